"""The modes of the command: the code of `mode=X` is `app/mode/X`."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.config import Mode, RunConfig


@dataclass(frozen=True, slots=True)
class ModeResult:
    """The value that a sweep optimizes, and the exit code of the process."""

    metric: float = 0.0
    exit_code: int = 0


WRITES = {Mode.train, Mode.sft, Mode.eval, Mode.parity}  # get a folder of their own, and checked inputs


def run_mode(mode: Mode, config: RunConfig, folder: Path | None, *inputs: Any) -> ModeResult:
    """Run a mode: its module is imported here, since plan must load neither torch nor Ray.

    A mode that writes gets its folder and `RunInputs`, another one the folder that `hydra.run.dir` names, or None.
    """
    result: ModeResult = importlib.import_module(f"app.mode.{mode.value}").run(config, folder, *inputs)
    return result
