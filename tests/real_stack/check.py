"""One check of a real stack, and how checks run: each in a process of its own, one after the other."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULT = "real-stack-result: "  # begins the line in which a check's process prints what it found
MESSAGE_LINES = 30
# What `mode=doctor` says of a machine without a device, a hub or a large disk. Everything else has to be ok.
OF_EVERY_MACHINE = {"driver", "devices", "memory", "disk", "hub", "model", "data", "shared memory"}


@dataclass(frozen=True)
class Check:
    """A function that returns what it found, as JSON, and raises what is wrong."""

    run: Callable[[], Any]
    driver: bool = False  # whether libraries stand in for the driver's
    environment: Mapping[str, str] = field(default_factory=dict)  # added to that of its process
    timeout_s: float = 900.0

    @property
    def name(self) -> str:
        return self.run.__name__


def run_doctor(device: str, lacking: set[str]) -> dict[str, Any]:
    """Run `mode=doctor` of every experiment of a device, which may fail for what is `lacking` alone."""
    found = {}
    for path in sorted((ROOT / "conf" / "experiment").glob(f"{device}*.yaml")):
        command = [sys.executable, "-m", "app", f"experiment={path.stem}", "mode=doctor"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        lines = [line for line in done.stdout.splitlines() if line.startswith(("ok ", "warn", "fail"))]
        assert lines, done.stderr
        subjects = [re.split(r"\s{2,}", line[6:])[0] for line in lines if line.startswith("fail")]
        assert set(subjects) <= lacking, "\n".join(line for line in lines if line.startswith("fail"))
        found[path.stem] = {"failed": subjects, "ok": sum(line.startswith("ok ") for line in lines)}
    return found


def run_here(check: Check) -> None:
    """Run a check in this process and print what it found."""
    found = check.run()
    sys.stdout.write(f"\n{RESULT}{json.dumps(found)}\n")


def run_all(
    device: str, checks: Iterable[Check], python: Path, tree: Path, libraries: Path
) -> dict[str, dict[str, Any]]:
    """Run each check with this interpreter in a tree of the project; a failing one does not stop the others.

    `libraries`: folder of those that stand in for a driver's.
    """
    outcomes: dict[str, dict[str, Any]] = {}
    for check in checks:
        outcomes[check.name] = outcome = _run(device, check, python, tree, libraries)
        print(f"{outcome['outcome']:<7} {check.name}  {outcome['seconds']:.0f} s", flush=True)
        if outcome["outcome"] == "failed":
            print(outcome["error"], flush=True)
    return outcomes


def _run(device: str, check: Check, python: Path, tree: Path, libraries: Path) -> dict[str, Any]:
    command = [str(python), "-m", "tests.real_stack", device, "--run", check.name]
    variables = {**os.environ, "PYTHONPATH": str(tree), "PYTHONWARNINGS": "ignore", **check.environment}
    if check.driver:
        variables["LD_LIBRARY_PATH"] = f"{libraries}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")
    began = time.monotonic()
    try:
        done = subprocess.run(command, cwd=tree, env=variables, capture_output=True, text=True, timeout=check.timeout_s)
    except subprocess.TimeoutExpired:
        return {"outcome": "failed", "seconds": check.timeout_s, "error": f"no end within {check.timeout_s:g} s"}

    seconds = round(time.monotonic() - began, 1)
    results = [line.removeprefix(RESULT) for line in done.stdout.splitlines() if line.startswith(RESULT)]
    if done.returncode == 0 and results:
        return {"outcome": "passed", "seconds": seconds, "found": json.loads(results[-1])}
    lines = (done.stderr or done.stdout).strip().splitlines()
    return {"outcome": "failed", "seconds": seconds, "error": "\n".join(lines[-MESSAGE_LINES:])}
