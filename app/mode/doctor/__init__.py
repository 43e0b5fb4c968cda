"""`mode=doctor`: check whether this machine can run the configuration. Exit code 1 when a check fails.

Invariants:
- Nothing is downloaded or written, and nothing is started but processes that try your own reward and the environment.
- Every finding that is not ok has a hint.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from app.config import RunConfig
from app.errors import FAILED_EXIT
from app.mode import ModeResult
from app.mode.doctor import device, machine, scripted_episode, software
from app.start.inputs import CheckStage, CheckStatus, Finding, RunInputs
from app.start.preflight import findings

OUTPUTS = Path("outputs")


def run(config: RunConfig, folder: Path | None) -> ModeResult:
    """Print the findings. The metric is the exit code."""
    found = examine(config, folder or OUTPUTS)
    sys.stdout.write(table(found) + "\n")
    code = FAILED_EXIT if any(each.status is CheckStatus.fail for each in found) else 0
    return ModeResult(float(code), code)


def examine(config: RunConfig, folder: Path = OUTPUTS) -> list[Finding]:
    """Run every check, in the order in which problems should be fixed."""
    inputs = RunInputs(config, CheckStage.doctor, folder=folder)
    return [
        *software.software(config, inputs.device),
        *device.hardware(config, inputs.device),
        *device.variables(config, inputs.device),
        *machine.machine(),
        *machine.surroundings(),
        *findings(inputs),
        *([scripted_episode.play_episode(inputs)] if config.environment.multi_turn else []),
        *machine.reachable(config),
    ]


def table(found: Sequence[Finding]) -> str:
    """Format one line per finding, each hint below its line, and the counts at the end."""
    width = max(len(one.subject) for one in found)
    lines: list[str] = []
    for one in found:
        lines.append(f"{one.status.name:<4}  {one.subject:<{width}}  {one.message}")
        if one.hint:
            lines.append(f"{'':<4}  {'':<{width}}  → {one.hint}")

    counts = [f"{sum(one.status is status for one in found)} {status.name}" for status in reversed(CheckStatus)]
    return "\n".join([*lines, ", ".join(counts)])
