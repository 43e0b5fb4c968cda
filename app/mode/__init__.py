"""What `mode=` runs: the code of `mode=X` is `app/mode/X`."""

import importlib
from dataclasses import dataclass
from pathlib import Path

from app.config import Mode, RunConfig

NOT_GIVEN = "<not given>"  # instead of a folder, where the command line names none


@dataclass(frozen=True, slots=True)
class ModeResult:
    """What a mode returns: the value that a sweep optimizes, and the process's exit code."""

    metric: float = 0.0
    exit_code: int = 0


WRITES = {Mode.train, Mode.sft, Mode.eval, Mode.parity}  # get a folder of their own
PREVIEWS = {Mode.plan, Mode.doctor}  # of a run with the same settings


def run_mode(mode: Mode, config: RunConfig, folder: Path) -> ModeResult:
    """Run a mode: its module is imported here, since plan must load neither torch nor Ray.

    A mode that does not write runs before Hydra makes a folder: `folder` is the run that `hydra.run.dir` names.

    Raises:
        ConfigError, RunError: By the mode.
    """
    result: ModeResult = importlib.import_module(f"app.mode.{mode.value}").run(config, folder)
    return result
