"""The machine of a measurement, and memory from /proc."""

import argparse
import json
import os
import platform
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

MIB = 1024 * 1024
IDLE_CORES = 0.25  # a machine whose other work takes more than this is busy
SCAN_INTERVAL_S = 2.0


class Options(argparse.ArgumentParser):
    """The arguments of a benchmark: `--rounds` and `--out`, and with `adds` also `--add`."""

    def __init__(self, description: str | None, *, rounds: int = 3, adds: bool = False) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.add_argument("--rounds", type=int, default=rounds)
        self.add_argument("--out", type=Path, help="also write the result to this file")
        if adds:
            self.add_argument("--add", action="store_true", help="add to what is in the file of --out")

    def parse(self) -> tuple[argparse.Namespace, dict[str, Any]]:
        """Return the arguments, and the result that `--add` adds to: empty if there is none yet."""
        given = self.parse_args()
        if not getattr(given, "add", False):
            return given, {}
        if given.out is None:
            self.error("--add needs --out FILE")
        return given, json.loads(given.out.read_text()) if given.out.exists() else {}


def machine(*packages: str) -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),  # far above the cores: the machine was not idle
        "architecture": platform.machine(),
        "python": platform.python_version(),
        **{package: version(package) for package in (packages or ("torch", "sglang", "ray"))},
    }


def conditions() -> dict[str, float]:
    """Return the load before a measurement: this benchmark itself must be idle during the call.

    `busy_cores` is the work of others right now. `load_average` also counts this benchmark's own last minute.
    """
    load_average = round(os.getloadavg()[0], 1)
    busy_cores = psutil.cpu_percent(SCAN_INTERVAL_S) / 100 * (os.cpu_count() or 1)
    return {"load_average": load_average, "busy_cores": round(busy_cores, 2)}


def busy(before: Iterable[dict[str, float]]) -> bool:
    """Whether the machine did other work before any of the measurements. Such a result is not to be quoted."""
    found = any(each["busy_cores"] > IDLE_CORES for each in before)
    if found:
        print("the machine is busy with other work: this result is marked `busy`", file=sys.stderr)
    return found


def spread(values: Iterable[float], digits: int) -> dict[str, float]:
    """Return the median, the least and the largest of the rounds."""
    values = list(values)
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
    }


def pss_by_process(processes: Iterable[psutil.Process]) -> dict[str, float]:
    """Return the proportional set size in MiB by kind of process. Ended processes count 0."""
    sizes: dict[str, float] = defaultdict(float)
    for process in processes:
        try:
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
            name = kind_of(process)
        except (OSError, psutil.Error):
            continue
        sizes[name] += next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0) / 1024
    return dict(sizes)


def kind_of(process: psutil.Process) -> str:
    """Return a short name: the process title, or the module or program it runs."""
    words = process.cmdline()
    if not words:
        return process.name()
    if "::" in words[0]:
        return words[0].split()[0]
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1]
    return next((Path(word).name for word in words[1:] if word.endswith(".py")), Path(words[0]).name)


def rss_mib() -> float:
    """Return the resident memory of this process in MiB."""
    return _status("VmRSS")


def peak_rss_mib() -> float:
    """Return the peak resident memory of this process in MiB since `reset_peak`."""
    return _status("VmHWM")


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 1024


def publish(result: dict[str, Any], out: Path | None) -> None:
    """Print a result as one JSON line, also to `out`."""
    line = json.dumps(result) + "\n"
    sys.stdout.write(line)
    if out is not None:
        out.write_text(line)
