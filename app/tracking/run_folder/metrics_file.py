"""`metrics.jsonl`: the numbers of a run, one line a step, in the order of the steps.

Always: a step has one line, each line is complete JSON, and what was appended is in the file when `append` returns (a
killed driver loses nothing). What is appended for the last step once more joins its line, so that an evaluation after
the step's numbers is found beside them. Numbers that JSON has no word for (NaN, infinity) are written as null.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType

NAME = "metrics.jsonl"


class MetricsFile:
    """The open file. One writer at a time."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("r+b" if path.exists() else "w+b")
        self._line_start, self._row = self._last_line()

    @property
    def last_step(self) -> int | None:
        return self._row["step"] if self._row else None

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a line, or add to the last one if it is this step's; an earlier step is a mistake (`ValueError`)."""
        last = self.last_step
        if last is not None and step < last:
            raise ValueError(f"step {step} comes after step {last} in {self._file.name}")
        if step != last:
            self._line_start, self._row = self._file.seek(0, os.SEEK_END), {"step": step}
        self._row.update({name: _number(value) for name, value in metrics.items() if name != "step"})
        self._file.seek(self._line_start)
        self._file.write(json.dumps(self._row).encode() + b"\n")
        self._file.truncate()
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "MetricsFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _last_line(self) -> tuple[int, dict]:
        """Where the last complete line starts and what it says; a line that a killed writer left half is removed."""
        self._file.seek(0)
        content = self._file.read()
        end = content.rfind(b"\n") + 1
        self._file.truncate(end)
        start = content.rfind(b"\n", 0, max(end - 1, 0)) + 1
        return start, json.loads(content[start:end]) if end else {}


def cut(path: Path, step: int) -> None:
    """Remove the lines of steps after `step`: what a resumed run will do again."""
    if not path.exists():
        return
    kept = [json.dumps(row) + "\n" for row in read(path) if row["step"] <= step]
    part = path.with_suffix(".part")
    part.write_text("".join(kept), encoding="utf-8")
    part.replace(path)


def read(path: Path) -> Iterator[dict]:
    """The rows, oldest first; a half line at the end (its writer was killed) is left out."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n") and line.strip():
                yield json.loads(line)


def _number(value: float) -> float | int | None:
    if isinstance(value, (bool, int)):
        return int(value)
    return float(value) if math.isfinite(value) else None
