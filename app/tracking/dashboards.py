"""TensorBoard, Weights & Biases and ClearML, in addition to the run's own files.

Each dashboard runs on its own thread behind a bounded queue. Its package is imported on that thread, and only if
`tracking.use` names it. Keys come from the environment or the package's own login, never from the configuration.

Invariants:
- A dashboard never blocks training or raises into it. Each failure is reported once.
- Metrics that do not fit the queue are dropped and counted.
- At the end of a run each dashboard has a deadline to send what is queued. Its helper processes live until then.
- A resumed run continues the same dashboard run. TensorBoard and ClearML replace the steps after the resume point; W&B
  cannot, and keeps those of the earlier attempt, with a warning.

Metrics without a prefix in `metrics.jsonl` are sent as `train/<name>`, so that dashboards group them.
"""

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from app.errors import one_line
from app.tracking.dashboard import Dashboard, DashboardOptions, grouped

log = logging.getLogger("app.run")

FOLDER = "tracking"  # in the run folder: the dashboards' own files
QUEUE_CAPACITY = 1000  # messages; a step is one or two
T = TypeVar("T")


def open_dashboard(name: str, options: DashboardOptions) -> Dashboard:
    """Import the package of a dashboard and open a run in it.

    Raises:
        ValueError: There is no dashboard of this name.
        Exception: Whatever the package raises.
    """
    if name == "tensorboard":
        from app.tracking.tensorboard import TensorBoard

        return TensorBoard(options)
    if name == "wandb":
        from app.tracking.wandb import WeightsAndBiases

        return WeightsAndBiases(options)
    if name == "clearml":
        from app.tracking.clearml import ClearML

        return ClearML(options)
    raise ValueError(f"{name} is not a dashboard")


def abandon_dashboard(name: str) -> None:
    """Ensure that a dashboard that hangs cannot keep the process from exiting."""
    if name == "wandb":
        from app.tracking.wandb import abandon

        abandon()


class DashboardWorker:
    """One dashboard's thread and queue.

    The thread opens the dashboard, sends the queued messages, and closes the dashboard after `close` was called. If the
    dashboard cannot be opened, all messages are discarded.
    """

    def __init__(self, name: str, options: DashboardOptions, capacity: int = QUEUE_CAPACITY) -> None:
        self.name = name
        self.dropped = 0  # messages
        self._options = options
        self._queue: queue.Queue[Callable[[Dashboard], None]] = queue.Queue(capacity)
        self._closing = threading.Event()
        self._open_failed = False
        self._abandoned = False
        self._status = "running"
        self._thread = threading.Thread(target=self._work, name=f"tracking-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue the metrics of a step. Returns at once and never raises."""
        values = grouped(metrics)
        self._put(lambda dashboard: dashboard.log(step, values))

    def alert(self, step: int, title: str, text: str) -> None:
        """Queue an alarm. Returns at once and never raises."""
        self._put(lambda dashboard: dashboard.alert(step, title, text))

    def samples(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Queue a table of trajectories. Returns at once and never raises."""
        self._put(lambda dashboard: dashboard.samples(step, name, rows))

    def close(self, status: str, timeout_s: float) -> None:
        """Send the queued messages and close the dashboard; abandon it after `timeout_s`."""
        self._status = status
        self._closing.set()
        self._thread.join(timeout_s)

        if self._thread.is_alive():
            self._options.warn(f"{self.name} did not finish within {timeout_s:.0f} s; the run ends without it.")
            # Errors from here on follow from the timeout, which was reported.
            self._abandoned = True
            self._guarded("could not be abandoned", lambda: abandon_dashboard(self.name))
        if self.dropped:
            self._options.warn(f"{self.name} was too slow: {self.dropped} messages were dropped.")

    def _put(self, message: Callable[[Dashboard], None]) -> None:
        if self._open_failed:
            return
        try:
            self._queue.put_nowait(message)
        except queue.Full:
            if not self.dropped:
                self._options.warn(f"{self.name} is too slow: messages that do not fit its queue are dropped.")
            self.dropped += 1

    def _work(self) -> None:
        dashboard = self._guarded("could not be opened", lambda: open_dashboard(self.name, self._options))
        if dashboard is None:
            self._open_failed = True
            return

        while not (self._closing.is_set() and self._queue.empty()):
            try:
                message = self._queue.get(timeout=0.2)
            except queue.Empty:
                continue
            self._guarded("failed on a message", partial(message, dashboard))
        self._guarded("could not be closed", lambda: dashboard.close(self._status))

    def _guarded(self, what: str, call: Callable[[], T]) -> T | None:
        """Return the call's result; report its error and return None if it fails."""
        try:
            return call()
        except (Exception, SystemExit) as error:  # third-party code may raise anything
            log.info("%s %s", self.name, what, exc_info=True)
            if not self._abandoned:
                self._options.warn(f"{self.name} {what}; the run continues without it: {one_line(error)}")
            return None
