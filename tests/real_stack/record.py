"""The outcome of the checks of a real stack, committed beside the results of benchmarks."""

import json
import subprocess
from pathlib import Path

from tests.real_stack.check import ROOT
from tests.real_stack.environment import pins_of

RESULTS = ROOT / "tests" / "bench" / "results"
LIST_PACKAGES = (
    "import importlib.metadata as m, json, platform;"
    "print(json.dumps({'python': platform.python_version(), "
    "**{d.name.lower().replace('_', '-'): d.version for d in m.distributions()}}))"
)


def path_of(device: str) -> Path:
    return RESULTS / f"real_stack_{device}.json"


def packages_of(python: Path) -> dict[str, str]:
    """Every package of an environment, and its Python."""
    command = [str(python), "-c", LIST_PACKAGES]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return dict(sorted(json.loads(listed).items()))


def moved_pins(device: str, packages: dict[str, str]) -> dict[str, tuple[str, str | None]]:
    """Package → (version of the requirements, version that was checked), where they differ."""
    checked = {name: packages.get(name.lower().replace("_", "-")) for name in pins_of(device)}
    return {name: (pin, checked[name]) for name, pin in pins_of(device).items() if not same(pin, checked[name])}


def same(pin: str, checked: str | None) -> bool:
    """A build of a version (2.10.0+cpu) is that version."""
    return checked is not None and checked.partition("+")[0] == pin.partition("+")[0]
