"""Dashboards beside the run's own files: TensorBoard, Weights & Biases, ClearML.

Each lives on a thread of its own behind a bounded queue. Always: nothing that a dashboard does, raises or waits for
reaches training. A failure is said once; numbers that find the queue full are dropped and counted; the end of a run
waits for a dashboard no longer than a deadline. Packages are imported on that thread, only where `tracking.use` names
them. Keys come from the environment (or the package's own login), never from the configuration.

Names are grouped so that dashboards fold well: what has no prefix in `metrics.jsonl` gets `train/`. A resumed run goes
on in the same dashboard run, and a step that was sent before is not sent twice (`Progress`).
"""

import logging
import math
import queue
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

from app.tracking.dashboard import Dashboard, DashboardOptions

log = logging.getLogger("app.run")

FOLDER = "tracking"  # in the run folder: what dashboards keep there
T = TypeVar("T")
QUEUE_CAPACITY = 1000  # messages; a step is one or two


def open_dashboard(name: str, start: DashboardOptions) -> Dashboard:
    """Import what `name` needs and open it; raises what the package raises."""
    if name == "tensorboard":
        from app.tracking.tensorboard import TensorBoard

        return TensorBoard(start)
    if name == "wandb":
        from app.tracking.wandb import WeightsAndBiases

        return WeightsAndBiases(start)
    if name == "clearml":
        from app.tracking.clearml import ClearML

        return ClearML(start)
    raise ValueError(f"no dashboard is called {name}")


def abandon_dashboard(name: str) -> None:
    """See to it that a dashboard that hangs does not keep our process from ending."""
    if name == "wandb":
        from app.tracking.wandb import abandon

        abandon()


def grouped(metrics: Mapping[str, float]) -> dict[str, float]:
    """Finite numbers under names with a prefix.

    >>> grouped({"lr": 0.1, "reward/mean": 0.5, "loss/policy": math.nan})
    {'train/lr': 0.1, 'reward/mean': 0.5}
    """
    return {
        name if "/" in name else f"train/{name}": float(value)
        for name, value in metrics.items()
        if value is not None and math.isfinite(value)
    }


class DashboardWorker:
    """The thread of one dashboard and the queue before it. `log`, `alert` return at once and never raise."""

    def __init__(self, name: str, start: DashboardOptions, capacity: int = QUEUE_CAPACITY) -> None:
        self.name, self.dropped = name, 0
        self._start = start
        self._queue: queue.Queue[Callable[[Dashboard], None]] = queue.Queue(capacity)
        self._ending, self._given_up, self._abandoned = threading.Event(), False, False
        self._status = "running"
        self._thread = threading.Thread(target=self._work, name=f"tracking-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = grouped(metrics)
        self._put(lambda dashboard: dashboard.log(step, values))

    def alert(self, step: int, title: str, text: str) -> None:
        self._put(lambda dashboard: dashboard.alert(step, title, text))

    def close(self, status: str, timeout_s: float) -> None:
        """Send what is queued and close, within `timeout_s`; then go on without it."""
        self._status = status
        self._ending.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._start.warn(f"{self.name} did not end within {timeout_s:.0f} s; the run ends without it.")
            self._abandoned = True  # what its end throws now was said already
            self._guarded("could not be abandoned", lambda: abandon_dashboard(self.name))
        if self.dropped:
            self._start.warn(f"{self.name} was too slow: {self.dropped} messages were not sent to it.")

    def _put(self, message: Callable[[Dashboard], None]) -> None:
        if self._given_up:
            return
        try:
            self._queue.put_nowait(message)
        except queue.Full:
            if not self.dropped:
                self._start.warn(f"{self.name} is too slow: what does not fit its queue is dropped.")
            self.dropped += 1

    def _work(self) -> None:
        dashboard = self._guarded("could not be opened", lambda: open_dashboard(self.name, self._start))
        if dashboard is None:
            self._given_up = True
            return
        while not (self._ending.is_set() and self._queue.empty()):
            try:
                message = self._queue.get(timeout=0.2)
            except queue.Empty:
                continue
            self._guarded("refused what it was sent", partial(message, dashboard))
        self._guarded("could not be closed", lambda: dashboard.close(self._status))

    def _guarded(self, what: str, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except (Exception, SystemExit) as error:  # a third party's anything: it must not reach training
            log.info("%s %s", self.name, what, exc_info=True)
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            if not self._abandoned:
                self._start.warn(f"{self.name} {what}, the run goes on without it: {reason}")
            return None
