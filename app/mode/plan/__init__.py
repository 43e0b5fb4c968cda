"""`mode=plan`: print the device layout, the batch arithmetic and a memory estimate. Needs no accelerator."""

import sys
from pathlib import Path

from app.config import RunConfig
from app.config.command_line import given_settings
from app.mode import ModeResult
from app.mode.plan import describe
from app.start.input_checks import sizes
from app.start.inputs import CheckStage, RunInputs
from app.start.preflight import problems


def run(config: RunConfig, _folder: Path | None) -> ModeResult:
    """Print the plan, and which inputs a run on this machine would refuse.

    Raises:
        ConfigError: The model and the settings of its preset do not go together.
    """
    inputs = RunInputs(config, CheckStage.plan)
    sizes(inputs)
    refused = problems(inputs)  # counts the steps of epochs
    sections = [describe.describe(inputs.config, given_settings())]
    if refused:
        sections.append("\n  ".join(["A run on this machine would be refused", *refused.values()]))

    sys.stdout.write("\n\n".join(sections) + "\n")
    return ModeResult()
