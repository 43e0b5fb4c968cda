"""`summary.json`: how a run stands, for scripts that ask one file.

Always: the file is whole (written beside and renamed), and everything but status, error and seconds follows from
`metrics.jsonl`, so that a resumed run's summary speaks of the whole run.
"""

import json
import os
import time
from collections.abc import Mapping
from enum import Enum
from pathlib import Path

NAME = "summary.json"
TOTALS = {  # total → the metric that is added up
    "total/completion_tokens": "tokens/completion",
    "total/prompt_tokens": "tokens/prompt",
    "total/step_seconds": "time/step",
    "total/generate_seconds": "time/generate",
    "total/train_seconds": "time/train",
    "total/sync_seconds": "time/sync",
}


class Status(Enum):
    running = "running"
    finished = "finished"
    interrupted = "interrupted"
    failed = "failed"


class Summary:
    """The summary of the run in `folder`; `total/seconds` goes on from what an earlier attempt left there."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._started = time.monotonic()
        self._seconds_before = float(read(folder).get("total/seconds", 0.0))
        self._status = Status.running
        self._error: str | None = None
        self.values: dict[str, float | int] = {"steps": 0}

    def add(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Take in what was logged of a step (of which there may be several parts)."""
        if "time/step" in metrics:
            self.values["steps"] = max(step, int(self.values["steps"]))
        accuracy = metrics.get("eval/accuracy")
        if accuracy is not None:
            self.values.setdefault("eval/accuracy_first", accuracy)
            self.values["eval/accuracy_last"] = accuracy
            self.values["eval/accuracy_best"] = max(accuracy, self.values.get("eval/accuracy_best", accuracy))
        for total, name in TOTALS.items():
            value = metrics.get(name)
            if value is not None:
                self.values[total] = self.values.get(total, 0) + value

    def end(self, status: Status, error: str | None) -> None:
        self._status, self._error = status, error

    def restart(self) -> None:
        """Forget the steps, to take in the rows of `metrics.jsonl` that a resumed run keeps."""
        self.values = {"steps": 0}

    @property
    def seconds(self) -> float:
        """Of this attempt and of earlier ones, from the recorder's start."""
        return round(self._seconds_before + time.monotonic() - self._started, 3)

    def write(self) -> None:
        content: dict[str, object] = {"status": self._status.value, **self.values, "total/seconds": self.seconds}
        if self._error is not None:
            content["error"] = self._error
        _write(self._path, content)


def read(folder: Path) -> dict:
    """What `summary.json` says; empty where there is none."""
    path = folder / NAME
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def mark_ended(folder: Path, status: Status, error: str) -> None:
    """Say from outside that the run's driver is gone: changes a summary that still says `running`, nothing else."""
    content = read(folder)
    if content.get("status") == Status.running.value:
        _write(folder / NAME, {**content, "status": status.value, "error": error})


def _write(path: Path, content: Mapping[str, object]) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    part.replace(path)
