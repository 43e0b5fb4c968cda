"""`summary.json`: the status and the totals of a run, for scripts.

Invariants:
- The file is replaced atomically, so readers never see half of it. (On a full disk it is overwritten in place, and a
  machine that stops meanwhile leaves half of it.) A file that cannot be read counts as empty.
- Everything but status, error, seconds and the facts follows from `metrics.jsonl`, so a resumed run's summary covers
  all attempts.
"""

import json
import re
import time
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from app.utils.files import overwrite

NAME = "summary.json"
TOTALS = {  # total → the metric that it sums
    "total/completion_tokens": "tokens/completion",
    "total/prompt_tokens": "tokens/prompt",
    "total/step_seconds": "time/step",
    "total/generate_seconds": "time/generate",
    "total/train_seconds": "time/train",
    "total/sync_seconds": "time/sync",
}
MAX_ERROR = 1000  # characters: with them the file fits into one block of a full disk
EVALUATED = re.compile(r"eval/(.+/)?prompts")  # prompts of an evaluation set


class Status(Enum):
    """The state of a run."""

    running = "running"
    finished = "finished"
    interrupted = "interrupted"
    failed = "failed"


class Summary:
    """The summary of the run in `folder`. `total/seconds` includes earlier attempts in the same folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._started = time.monotonic()
        before = read(folder)
        self._seconds_before = float(before.get("total/seconds", 0.0))
        self._status = Status.running
        self._error: str | None = None
        # The attempts, and facts such as the evaluated checkpoint or what was kept.
        self.facts: dict[str, str | int | float] = {"attempts": int(before.get("attempts", bool(before))) + 1}
        self.values: dict[str, float | int] = {"steps": 0}
        self.accuracies: dict[int, float] = {}  # of the evaluations, by step

    def add(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Add metrics of a step. The metrics of one step may come in several calls."""
        if "time/step" in metrics:
            self.values["steps"] = max(step, int(self.values["steps"]))

        accuracy = metrics.get("eval/accuracy")
        if accuracy is not None:
            self.accuracies[step] = accuracy
            self.values["eval/evaluations"] = len(self.accuracies)
            self.values.setdefault("eval/accuracy_first", accuracy)
            self.values["eval/accuracy_last"] = accuracy
            if accuracy > self.values.get("eval/accuracy_best", -1.0):
                self.values["eval/accuracy_best"] = accuracy
                self.values["eval/accuracy_best_step"] = step

        prompts = [value for name, value in metrics.items() if EVALUATED.fullmatch(name) and value is not None]
        if prompts:
            self.values["eval/prompts"] = round(sum(prompts))

        for total, name in TOTALS.items():
            value = metrics.get(name)
            if value is not None:
                self.values[total] = self.values.get(total, 0) + value

    def end(self, status: Status, error: str | None) -> None:
        """Set the final status, and the error without the middle of a long one; `write` saves them."""
        self._status = status
        if error is not None and len(error) > MAX_ERROR:
            error = f"{error[: MAX_ERROR // 2]} … {error[-MAX_ERROR // 2 :]}"
        self._error = error

    def reset(self) -> None:
        """Remove all steps. A resumed run then adds the rows that remain in `metrics.jsonl`."""
        self.values = {"steps": 0}
        self.accuracies = {}

    @property
    def seconds(self) -> float:
        """Seconds of this attempt so far and of all earlier ones."""
        return round(self._seconds_before + time.monotonic() - self._started, 3)

    def write(self) -> None:
        content: dict[str, object] = {"status": self._status.value, **self.facts, **self.values}
        content["total/seconds"] = self.seconds
        if self._error is not None:
            content["error"] = self._error
        overwrite(self._path, json.dumps(content, indent=2) + "\n")


def read(folder: Path) -> dict[str, Any]:
    """Return the content of `summary.json`; an empty dictionary if there is none that can be read."""
    try:
        content = json.loads((folder / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def accuracy(values: Mapping[str, Any]) -> float:
    """Return the accuracy of the last evaluation in the content of a summary; 0 without one."""
    return float(values.get("eval/accuracy_last", 0.0))


def is_finished(folder: Path) -> bool:
    """Whether the run in `folder` finished."""
    return bool(read(folder).get("status") == Status.finished.value)
