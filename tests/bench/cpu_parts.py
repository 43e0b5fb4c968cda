"""Where the CPU time of a process goes: its main thread by package of `app`, and its other threads."""

import collections
import selectors
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

SAMPLE_SECONDS = 0.001  # of CPU time; the kernel rounds up to its clock's tick


@dataclass
class CpuTime:
    """CPU seconds of a block. `parts` are of the main thread, sampled."""

    process: float = 0.0
    main_thread: float = 0.0
    samples: collections.Counter[str] = field(default_factory=collections.Counter)

    @property
    def other_threads(self) -> float:
        return self.process - self.main_thread

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by part, most first. `event loop` is what runs outside of `app`: asyncio, Ray's callbacks."""
        total = max(self.samples.total(), 1)
        return {part: self.main_thread * count / total for part, count in self.samples.most_common()}


@contextmanager
def cpu_time(*, sampled: bool = False) -> Iterator[CpuTime]:
    """Measure the block; `sampled` also finds its parts, for a few per cent of its time."""
    measured = CpuTime()
    process, main_thread = time.process_time(), time.thread_time()
    before = signal.signal(signal.SIGPROF, lambda _, frame: measured.samples.update(_parts_of(frame)))
    try:
        if sampled:
            signal.setitimer(signal.ITIMER_PROF, SAMPLE_SECONDS, SAMPLE_SECONDS)
        yield measured
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)
        measured.process = time.process_time() - process
        measured.main_thread = time.thread_time() - main_thread


def _parts_of(frame: FrameType | None) -> list[str]:
    """Return the innermost package of `app` on the stack; nothing while the main thread waits for others."""
    if frame is not None and frame.f_code.co_filename == selectors.__file__:
        return []
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith("app."):
            return [".".join(module.split(".")[1:3])]
        if module.startswith("tests."):
            return ["simulation"]
        frame = frame.f_back
    return ["event loop"]
