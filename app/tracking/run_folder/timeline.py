"""`timeline.json`: when each part of the run did what, as a Chrome trace that Perfetto (ui.perfetto.dev) opens.

Always: the spans of a row of the trace nest or follow each other; what overlaps on one track (groups that are generated
at the same time) is laid out on further rows when the file is written. Size is bounded: the newest `capacity` spans are
kept and the file says how many older ones are not. A span costs some microseconds.

Format: "Trace Event Format" (Chromium), complete events (`ph: X`) in microseconds and metadata events (`ph: M`).
"""

import json
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

NAME = "timeline.json"
PID = 1
ROUNDING = 1e-6  # seconds: spans that touch within this do not overlap
WRITING_SHARE = 0.005  # of the run's time may go into rewriting the file while the run goes on
WRITE_EVERY_S = 30.0


class Span(NamedTuple):
    """`start` and `end` in seconds since 1970."""

    track: str
    name: str
    start: float
    end: float
    args: dict[str, object]


class Timeline:
    """The spans of a run so far."""

    def __init__(self, capacity: int = 50_000) -> None:
        self._spans: deque[Span] = deque(maxlen=capacity)
        self._added = 0
        self._clock_zero = time.time() - time.perf_counter()  # one clock for all spans, even if the date is set
        self._next_write = self.now() + WRITE_EVERY_S

    def now(self) -> float:
        """Seconds since 1970 on this timeline's own steady clock."""
        return self._clock_zero + time.perf_counter()

    @contextmanager
    def span(self, track: str, name: str, **args: object) -> Iterator[None]:
        """Record the time the body takes, also when it raises. `args` are shown when the span is selected."""
        start = self.now()
        try:
            yield
        finally:
            self.add(track, name, start, self.now(), args)

    def add(self, track: str, name: str, start: float, end: float, args: dict[str, object] | None = None) -> None:
        """Record a span that was measured elsewhere; `start` and `end` in seconds since 1970 (`time.time()`)."""
        self._added += 1
        self._spans.append(Span(track, name, start, max(start, end), args or {}))

    def write(self, folder: Path) -> None:
        """Write the whole file."""
        spans = sorted(self._spans, key=lambda span: (span.start, -span.end))
        zero = spans[0].start if spans else self.now()
        events = trace_events(spans, zero)
        content = {
            "displayTimeUnit": "ms",
            "otherData": {"zero_unix_seconds": zero, "older_spans_left_out": self._added - len(self._spans)},
            "traceEvents": events,
        }
        part = folder / f"{NAME}.part"
        part.write_text(json.dumps(content, separators=(",", ":")), encoding="utf-8")
        part.replace(folder / NAME)

    def write_if_due(self, folder: Path) -> None:
        """Write now and then, so that a killed run leaves a trace too, within `WRITING_SHARE` of the run's time."""
        start = self.now()
        if start < self._next_write:
            return
        self.write(folder)
        taken = self.now() - start
        self._next_write = start + max(WRITE_EVERY_S, taken / WRITING_SHARE)

    def load(self, folder: Path) -> None:
        """Take in the file that an earlier attempt of this run left, unless this one has spans of its own already."""
        path = folder / NAME
        if self._added or not path.exists():
            return
        content = json.loads(path.read_text(encoding="utf-8"))
        zero, tracks = content["otherData"]["zero_unix_seconds"], {}
        for event in content["traceEvents"]:
            if event["ph"] == "M" and event["name"] == "thread_name":
                tracks[event["tid"]] = event["args"]["name"].split(" ·")[0]
            elif event["ph"] == "X":
                start = zero + event["ts"] / 1e6
                self.add(tracks[event["tid"]], event["name"], start, start + event["dur"] / 1e6, event["args"])
        self._added += content["otherData"]["older_spans_left_out"]


def trace_events(spans: list[Span], zero: float) -> list[dict[str, object]]:
    """Metadata and complete events; `spans` sorted by start, longer ones first. Tracks keep their first appearance."""
    rows: dict[str, list[list[float]]] = {}  # track → its rows → ends of the spans that are open there, outermost first
    placed = [(span, _row_of(rows.setdefault(span.track, []), span)) for span in spans]
    first_tid, following = {}, 1
    for track, open_ends in rows.items():
        first_tid[track], following = following, following + len(open_ends)
    events: list[dict[str, object]] = [
        {"ph": "M", "pid": PID, "tid": 0, "name": "process_name", "args": {"name": "run"}}
    ]
    for track, open_ends in rows.items():
        for row in range(len(open_ends)):
            tid, name = first_tid[track] + row, track if row == 0 else f"{track} ·{row + 1}"
            events.append({"ph": "M", "pid": PID, "tid": tid, "name": "thread_name", "args": {"name": name}})
            events.append({"ph": "M", "pid": PID, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}})
    for span, row in placed:
        start, end = round((span.start - zero) * 1e6, 1), round((span.end - zero) * 1e6, 1)
        common = {"ph": "X", "pid": PID, "tid": first_tid[span.track] + row, "name": span.name, "cat": span.track}
        events.append({**common, "ts": start, "dur": round(end - start, 1), "args": span.args})
    return events


def _row_of(rows: list[list[float]], span: Span) -> int:
    """The first row on which the span follows or nests; a new one if there is none."""
    for index, ends in enumerate(rows):
        while ends and ends[-1] <= span.start + ROUNDING:
            ends.pop()
        if not ends or span.end <= ends[-1] + ROUNDING:
            ends.append(span.end)
            return index
    rows.append([span.end])
    return len(rows) - 1
