"""`timeline.json`: a Chrome trace of the run for Perfetto (ui.perfetto.dev).

Invariants:
- Spans in one row of the trace nest or follow each other. Overlapping spans of a track, such as groups generated
  concurrently, are laid out in additional rows when the file is written.
- The size is bounded: the newest `capacity` spans are kept, and the file counts the older ones.
- Recording a span takes microseconds.

Format: "Trace Event Format" (Chromium), complete events (`ph: X`) in microseconds and metadata events (`ph: M`).
"""

import json
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from app.utils.files import replace_file

NAME = "timeline.json"
PID = 1
ROUNDING = 1e-6  # seconds; smaller overlaps count as touching
WRITING_SHARE = 0.005  # of the run's time may be spent on rewriting the file
WRITE_EVERY_S = 30.0


class Span(NamedTuple):
    """A named interval on a track; `start` and `end` in Unix seconds."""

    track: str
    name: str
    start: float
    end: float
    args: dict[str, object]


class Timeline:
    """Records the spans of a run.

    Example:
        timeline = Timeline()
        with timeline.span("driver", "train", step=1):
            ...
        timeline.write(folder)
    """

    def __init__(self, capacity: int = 50_000) -> None:
        self._spans: deque[Span] = deque(maxlen=capacity)
        self._added = 0
        # A steady clock, so that setting the system time does not disorder the spans.
        self._clock_zero = time.time() - time.perf_counter()
        self._next_write = self.now() + WRITE_EVERY_S

    def now(self) -> float:
        return self._clock_zero + time.perf_counter()

    @contextmanager
    def span(self, track: str, name: str, **args: object) -> Iterator[None]:
        """Record the duration of the body, also when it raises. Perfetto shows `args` for the selected span."""
        start = self.now()
        try:
            yield
        finally:
            self.add(track, name, start, self.now(), args)

    def add(self, track: str, name: str, start: float, end: float, args: dict[str, object] | None = None) -> None:
        """Record a span that was measured elsewhere; `start` and `end` in Unix seconds."""
        self._added += 1
        self._spans.append(Span(track, name, start, max(start, end), args or {}))

    def write(self, folder: Path) -> None:
        spans = sorted(self._spans, key=lambda span: (span.start, -span.end))
        zero = spans[0].start if spans else self.now()
        content = {
            "displayTimeUnit": "ms",
            "otherData": {"zero_unix_seconds": zero, "older_spans_left_out": self._added - len(self._spans)},
            "traceEvents": trace_events(spans, zero),
        }
        replace_file(folder / NAME, json.dumps(content, separators=(",", ":")))

    def write_if_due(self, folder: Path) -> None:
        """Write periodically, so that a killed run leaves a trace, in at most `WRITING_SHARE` of the run's time."""
        start = self.now()
        if start >= self._next_write:
            self.write(folder)
            self._next_write = start + max(WRITE_EVERY_S, (self.now() - start) / WRITING_SHARE)


def trace_events(spans: list[Span], zero: float) -> list[dict[str, object]]:
    """Return metadata and events of spans that are sorted by start, longer ones first; `zero` is in Unix seconds.

    Tracks are in order of their first span.
    """
    rows: dict[str, list[list[float]]] = {}  # track → its rows → the ends of the row's open spans, outermost first
    row_of_span = [_assign_row(rows.setdefault(span.track, []), span) for span in spans]

    process = {"ph": "M", "pid": PID, "tid": 0, "name": "process_name", "args": {"name": "run"}}
    events: list[dict[str, object]] = [process]
    first_tid: dict[str, int] = {}
    tid = 0
    for track, open_ends in rows.items():
        first_tid[track] = tid + 1
        for row in range(len(open_ends)):
            tid += 1
            name = track if row == 0 else f"{track} ·{row + 1}"
            events.append({"ph": "M", "pid": PID, "tid": tid, "name": "thread_name", "args": {"name": name}})
            events.append({"ph": "M", "pid": PID, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}})

    for span, row in zip(spans, row_of_span, strict=True):
        start = round((span.start - zero) * 1e6, 1)
        end = round((span.end - zero) * 1e6, 1)
        common = {"ph": "X", "pid": PID, "tid": first_tid[span.track] + row, "name": span.name, "cat": span.track}
        events.append({**common, "ts": start, "dur": round(end - start, 1), "args": span.args})
    return events


def _assign_row(rows: list[list[float]], span: Span) -> int:
    """Add the span to the first row in which it nests or follows, or to a new row; return the row's index."""
    for index, ends in enumerate(rows):
        while ends and ends[-1] <= span.start + ROUNDING:
            ends.pop()
        if not ends or span.end <= ends[-1] + ROUNDING:
            ends.append(span.end)
            return index
    rows.append([span.end])
    return len(rows) - 1
