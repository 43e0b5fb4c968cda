"""What a measurement was taken on, and memory as the kernel counts it."""

import os
import platform
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any


def machine(*packages: str) -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),  # well above the cores: others were at work
        "architecture": platform.machine(),
        "python": platform.python_version(),
        **{package: version(package) for package in (packages or ("torch", "sglang", "ray"))},
    }


def pss_mib(pids: Iterable[int]) -> float:
    """Proportional set size of these processes together; those that have ended count nothing."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
    return total / 1024
