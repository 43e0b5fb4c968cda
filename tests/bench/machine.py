"""What a measurement was taken on, and memory as the kernel counts it."""

import asyncio
import json
import os
import platform
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

MIB = 1024 * 1024


def machine(*packages: str) -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),  # well above the cores: others were at work
        "architecture": platform.machine(),
        "python": platform.python_version(),
        **{package: version(package) for package in (packages or ("torch", "sglang", "ray"))},
    }


def pss_by_process(processes: Iterable[psutil.Process]) -> dict[str, float]:
    """MiB of proportional set size by what the processes are; those that have ended count nothing."""
    found: dict[str, float] = defaultdict(float)
    for process in processes:
        try:
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
            name = kind_of(process)
        except (OSError, psutil.Error):
            continue
        found[name] += next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0) / 1024
    return dict(found)


def kind_of(process: psutil.Process) -> str:
    """A short name: what the process calls itself, or the module or program that it runs."""
    words = process.cmdline()
    if not words:
        return process.name()
    if "::" in words[0]:
        return words[0].split()[0]
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1]
    return next((Path(word).name for word in words[1:] if word.endswith(".py")), Path(words[0]).name)


def rss_mib() -> float:
    """Resident memory of this process."""
    return _status("VmRSS")


def peak_rss_mib() -> float:
    """The largest resident memory of this process since `reset_peak`."""
    return _status("VmHWM")


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 1024


def print_result(measure: Callable[[Path], Coroutine[Any, Any, dict[str, Any]]], out: Path | None) -> None:
    """Measure with a Ray of its own and a folder that is removed; one JSON line, also into `out`."""
    import ray

    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=256 * MIB)
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = json.dumps(asyncio.run(measure(Path(folder))))
    finally:
        ray.shutdown()
    sys.stdout.write(found + "\n")
    if out is not None:
        out.write_text(found + "\n")
