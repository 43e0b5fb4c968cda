"""All checks of `mode=doctor`: can this configuration run on this machine?

Invariants:
- Nothing is downloaded or written, and nothing is started but processes that try your own reward and the environment.
- Every check that is not ok has a hint.
- The exit code is 1 if a check fails.
"""

from pathlib import Path

from app.config import RunConfig
from app.device import device_of
from app.mode.doctor.device import environment, hardware
from app.mode.doctor.environment_packages import environment_packages
from app.mode.doctor.finding import Check, CheckStatus, table
from app.mode.doctor.machine import OUTPUTS, machine, reachable
from app.mode.doctor.software import software

FAILED = 1


def examine(config: RunConfig, folder: Path = Path(OUTPUTS)) -> list[Check]:
    """Run every check, in the order in which problems should be fixed."""
    device = device_of(config.device.kind)
    return [
        *software(config, device),
        *environment_packages(config),
        *hardware(config, device),
        *environment(config, device),
        *machine(config, folder),
        *reachable(config),
    ]


def report(config: RunConfig, folder: Path = Path(OUTPUTS)) -> tuple[str, int]:
    """Return the table and the exit code."""
    checks = examine(config, folder)
    failed = any(one.status is CheckStatus.fail for one in checks)
    return table(checks), FAILED if failed else 0
