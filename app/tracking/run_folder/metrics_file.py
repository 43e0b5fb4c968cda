"""`metrics.jsonl`: one line of metrics per step, in step order.

Invariants:
- Each step has one line, and each complete line is valid JSON.
- A row is in the file when `append` returns, so a killed driver loses nothing.
- Metrics appended to the last step again join its line, so an evaluation is in the line of its step.
- NaN and infinity, which JSON lacks, are written as null.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from app.utils.files import replace_end, replace_file, sync

NAME = "metrics.jsonl"


class MetricsFile:
    """The file opened for writing, by one writer at a time. A half line of a killed writer is removed.

    A row that does not fit on the disk leaves the file as it was.

    Example:
        file = MetricsFile(folder / "metrics.jsonl")
        file.append(1, {"lr": 1e-6})
        file.append(1, {"eval/accuracy": 0.5})  # {"step": 1, "lr": 1e-6, "eval/accuracy": 0.5}
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("r+b" if path.exists() else "w+b", buffering=0)
        self._line_start, self._row = self._last_line()

    @property
    def last_step(self) -> int | None:
        """The step of the last line, or None if the file is empty."""
        return self._row["step"] if self._row else None

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a line, or extend the last one of the same step. Raises `ValueError` if `step` comes before it."""
        last = self.last_step
        if last is not None and step < last:
            raise ValueError(f"step {step} comes after step {last} in {self._file.name}")

        row = self._row if step == last else {"step": step}
        start = self._line_start if step == last else self._file.seek(0, os.SEEK_END)
        row = row | {name: _number(value) for name, value in metrics.items() if name != "step"}
        replace_end(self._file, start, _lines([row]).encode())
        self._line_start, self._row = start, row

    def close(self) -> None:
        self._file.close()

    def _last_line(self) -> tuple[int, dict[str, Any]]:
        """Remove an incomplete line at the end; return the offset and the content of the last complete line."""
        self._file.seek(0)
        content = self._file.read()
        end = content.rfind(b"\n") + 1
        self._file.truncate(end)
        start = content.rfind(b"\n", 0, max(end - 1, 0)) + 1
        return start, json.loads(content[start:end]) if end else {}


def move_after(path: Path, step: int, out: Path) -> None:
    """Move the lines after `step` to a new file, if there are any. A crash in between leaves them in both files."""
    rows = list(read(path))
    later = [row for row in rows if row["step"] > step]
    if later:
        out.parent.mkdir(parents=True, exist_ok=True)
        replace_file(out, _lines(later), durable=True)
        sync(out.parent.parent)

    if path.exists():  # also without later lines: a killed writer may have left half a line
        replace_file(path, _lines([row for row in rows if row["step"] <= step]), durable=True)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows, oldest first, without an incomplete line at the end. A missing file has none."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n") and line.strip():
                yield json.loads(line)


def _lines(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _number(value: float) -> float | int | None:
    if isinstance(value, (bool, int)):
        return int(value)
    return float(value) if math.isfinite(value) else None
