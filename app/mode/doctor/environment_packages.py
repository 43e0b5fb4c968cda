"""Checks of the packages that an environment of another library needs, in the interpreter of the workers."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from app.config import RunConfig
from app.config.environment import EnvironmentKind
from app.environment import openenv, verifiers
from app.mode.doctor.finding import Check, CheckStatus, check

VERSIONS_S = 60.0  # of an interpreter on network storage
VERSIONS = """
import importlib.metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        found[name] = None
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Adapter:
    """What a library's environments need."""

    packages: Sequence[str]
    pins: str
    supported: Callable[[Mapping[str, str | None]], bool]


ADAPTERS = {
    EnvironmentKind.verifiers: Adapter(verifiers.PACKAGES, verifiers.PINS, verifiers.supported),
    EnvironmentKind.openenv: Adapter(openenv.PACKAGES, openenv.PINS, openenv.supported),
}


def environment_packages(config: RunConfig) -> Iterator[Check]:
    """Compare the installed packages of `environment.python` with the pins of the adapter, if there is one."""
    kind = config.environment.kind
    adapter = ADAPTERS.get(kind)
    if adapter is None:
        return

    python = config.environment.python or sys.executable
    try:
        found = installed_in(python, adapter.packages)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        message = f"environment.python={python} cannot be asked for its packages ({reason})"
        yield Check(kind.name, CheckStatus.fail, message, "give the path of a Python interpreter")
        return

    shown = ", ".join(f"{name} {version or 'not installed'}" for name, version in found.items())
    hint = f"install {adapter.pins}, in an interpreter of its own, and give environment.python=<venv>/bin/python"
    yield check(kind.name, adapter.supported(found), f"{shown} in {python} (supported: {adapter.pins})", hint)


def installed_in(python: str, packages: Sequence[str]) -> dict[str, str | None]:
    """Return the versions of packages in an interpreter, None where one is not installed.

    Raises:
        OSError: It cannot be run.
        SubprocessError: It fails, or takes too long.
        ValueError: It is no Python interpreter.
    """
    done = subprocess.run(
        [python, "-I", "-c", VERSIONS, *packages], capture_output=True, timeout=VERSIONS_S, check=True
    )
    found: dict[str, str | None] = json.loads(done.stdout)
    return found
