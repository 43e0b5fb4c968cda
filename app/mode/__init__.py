"""What `mode=` runs. One table; the code of `mode=X` is `app/mode/X`."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from app.config import Mode, RunConfig

NOT_GIVEN = "<not given>"  # instead of a folder, where the command line names none


@dataclass(frozen=True, slots=True)
class ModeResult:
    """What a mode returns: the value that a sweep optimizes, and the process's exit code."""

    metric: float = 0.0
    exit_code: int = 0


@dataclass(frozen=True, slots=True)
class ModeSpec:
    """One row of the table.

    `writes` says whether the mode gets a folder of its own. A mode without one runs before Hydra makes a folder, and
    its `folder` argument is the existing run that `hydra.run.dir` names.
    """

    module: str  # has `run(config, folder)`; imported when used, since plan must load neither torch nor Ray
    writes: bool

    def run(self, config: RunConfig, folder: Path) -> ModeResult:
        """Run the mode. Raises `ConfigError` or `RunError`."""
        run: Callable[[RunConfig, Path], ModeResult] = importlib.import_module(self.module).run
        return run(config, folder)


MODES = {
    Mode.train: ModeSpec("app.mode.train", writes=True),
    Mode.sft: ModeSpec("app.mode.sft", writes=True),
    Mode.eval: ModeSpec("app.mode.eval", writes=True),
    Mode.parity: ModeSpec("app.mode.parity", writes=True),
    Mode.plan: ModeSpec("app.mode.plan", writes=False),
    Mode.doctor: ModeSpec("app.mode.doctor", writes=False),
    Mode.export: ModeSpec("app.mode.export", writes=False),
    Mode.report: ModeSpec("app.mode.report", writes=False),
}
