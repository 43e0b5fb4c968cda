"""What a run has kept, for its last lines and `summary.json`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.checkpoint.export import FOLDER as EXPORT
from app.checkpoint.folder import best, latest, step_of
from app.checkpoint.run_state import read_state
from app.config.command_line import command, override
from app.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Kept:
    """The checkpoints of the run in `folder` and the model that it exported, as far as there are any."""

    folder: Path
    last: Path | None
    best: Path | None
    accuracy: float | None  # of the best
    model: Path | None

    @property
    def facts(self) -> dict[str, str | int | float]:
        """For `summary.json`."""
        facts: dict[str, str | int | float] = {}
        if self.model is not None:
            facts["model"] = str(self.model)
        if self.last is not None:
            facts["checkpoint/last"] = str(self.last)
        if self.best is not None and self.accuracy is not None:
            facts["checkpoint/best"] = str(self.best)
            facts["checkpoint/best_step"] = step_of(self.best)
            facts["checkpoint/best_accuracy"] = self.accuracy
        return facts

    def lines(self, continued: Sequence[str] = ()) -> Mapping[str, str]:
        """What is where; after a finished run also how to evaluate it, and to continue it with these overrides."""
        lines: dict[str, str] = {}
        if self.model is not None:
            lines["model"] = str(self.model)
        if self.last is not None:
            lines["last"] = str(self.last)
        if self.best is not None and self.accuracy is not None:
            lines["best"] = f"{self.best}  (eval accuracy {self.accuracy:.1%})"
        if self.last is not None and continued:
            resume = override("resume", self.folder)
            lines["evaluate"] = command("mode=eval", resume)
            lines["continue"] = command(resume, *continued)
        return lines


def kept_in(folder: Path, *, exported: bool) -> Kept:
    """Return what the run in `folder` has kept. `exported` says whether `export/` holds its last step."""
    try:
        last, top = latest(folder), best(folder)
        accuracy = read_state(top).accuracy if top is not None else None
    except CheckpointError:  # the run's own error says it, if it matters
        last, top, accuracy = None, None, None
    return Kept(folder, last, top, accuracy, folder / EXPORT if exported else None)
