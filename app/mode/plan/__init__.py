"""`mode=plan`: print the device layout, the batch arithmetic and a memory estimate. Needs no accelerator."""

import sys
from pathlib import Path

from app.config import RunConfig
from app.config.command_line import given_settings
from app.mode import ModeResult
from app.mode.inputs import check_sizes, problems, with_counted_steps
from app.mode.plan import describe


def run(config: RunConfig, _folder: Path) -> ModeResult:
    """Print the plan, and which inputs a run on this machine would refuse.

    Raises:
        ConfigError: The model and the settings of its preset do not go together.
    """
    check_sizes(config)
    config = with_counted_steps(config)
    sections = [describe.describe(config, given_settings())]
    if refused := problems(config):
        sections.append(
            "\n".join(["A run on this machine would be refused", *(f"  {each}" for each in refused.values())])
        )

    sys.stdout.write("\n\n".join(sections) + "\n")
    return ModeResult()
