"""TensorBoard, Weights & Biases, ClearML, Prometheus and trackers of the user's own, beside the run's own files.

Each dashboard runs on its own thread behind a bounded queue. Its package is imported on that thread, and only if
`tracking.use` names it. Keys come from the environment or the package's own login, never from the configuration.

Invariants:
- A dashboard never blocks training or raises into it. Its first failed message is a warning; all are in the log.
- Metrics that do not fit the queue are dropped and counted.
- At the end of a run all dashboards are closed concurrently, and each has the whole deadline to send what is queued.
  Their helper processes live until then.
- A resumed run continues the same dashboard run. TensorBoard and ClearML replace the steps after the resume point; W&B
  cannot, and keeps those of the earlier attempt, with a warning.

Metrics without a prefix in `metrics.jsonl` are sent as `train/<name>`, so that dashboards group them.
"""

import inspect
import json
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from app.config.tracking import TRACKERS, TrackingConfig
from app.errors import one_line
from app.utils.files import replace_file
from app.utils.user_code import error_text, require, resolve

log = logging.getLogger("app.run")

FOLDER = "tracking"  # in the run folder: the dashboards' own files
BUILT_IN = {  # tracker → its class
    "tensorboard": "app.tracking.tensorboard.TensorBoard",
    "wandb": "app.tracking.wandb.WeightsAndBiases",
    "clearml": "app.tracking.clearml.ClearML",
    "prometheus": "app.tracking.prometheus.Prometheus",
}
QUEUE_CAPACITY = 1000  # messages; a step is one or two
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DashboardOptions:
    """Describes the run to a dashboard: the first argument of a user's own tracker."""

    config: Mapping[str, Any]  # the resolved configuration, without OmegaConf types
    folder: Path  # the dashboard's folder in the run folder; may not exist yet
    metrics: Path  # the run's metrics.jsonl
    project: str
    run_name: str
    offline: bool
    resumed_at: int | None  # the step that the run resumes after; None: a new run
    warn: Callable[[str], None]  # shows a warning and adds it to the report
    args: Mapping[str, Any] = field(default_factory=dict)  # of a tracker of the user's own


def run_name(config: TrackingConfig, folder: Path) -> str:
    """Return the run's name in dashboards: as given, or those of its folder and the folder's parent."""
    return config.run_name or f"{folder.parent.name}/{folder.name}"


def grouped(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Return the finite metrics, all of them with a prefix.

    >>> grouped({"lr": 0.1, "reward/mean": 0.5, "loss/policy": math.nan})
    {'train/lr': 0.1, 'reward/mean': 0.5}
    """
    return {
        name if "/" in name else f"train/{name}": float(value)
        for name, value in metrics.items()
        if value is not None and math.isfinite(value)
    }


class Progress:
    """`tracking/<dashboard>.json`: the dashboard's run id and the last step that it confirmed, for resumed runs."""

    def __init__(self, options: DashboardOptions) -> None:
        self._path = options.folder.with_suffix(".json")
        resumed = options.resumed_at is not None and self._path.exists()
        self._content = json.loads(self._path.read_text(encoding="utf-8")) if resumed else {}
        self.run_id: str | None = self._content.get("run_id")  # of the earlier attempt; None for a new run
        self.last_step = int(self._content.get("last_step", -1))  # that the dashboard has from earlier attempts

    def opened(self, run_id: str) -> None:
        self._write(run_id=run_id)

    def confirm(self, step: int) -> None:
        """Save that the dashboard has every step up to this one, which was sent: it may lose it until then."""
        self._write(last_step=max(self.last_step, step))

    def _write(self, **content: str | int) -> None:
        self._content.update(content)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self._path, json.dumps(self._content))


def open_dashboard(name: str, options: DashboardOptions) -> Any:
    """Import a dashboard's package and open a run in it. Raises `LoadError`, and whatever the package raises."""
    if name in BUILT_IN:
        return resolve(BUILT_IN[name])(options)
    own = resolve(name)(options, **options.args)
    if not callable(getattr(own, "log", None)):
        raise TypeError(f"{name} returned {type(own).__name__}, which has no method log")
    return own


def require_trackers(config: TrackingConfig) -> None:
    """Raise `ConfigError` if a tracker of the user's cannot be imported or constructed with `tracking.args`.

        class MyTracker:
            def __init__(self, run, **args): ...          # run: DashboardOptions; args: tracking.args
            def log(self, step, metrics): ...             # names to finite numbers
            def alert(self, step, title, text): ...       # optional
            def samples(self, step, kind, rows): ...      # optional; kind: "step" or "eval"
            def close(self, status): ...                  # optional; finished, interrupted or failed

    All calls come from one thread of its own, in order. They may block and raise. A function may return such an object.
    """

    def attempt(made: Any) -> str | None:
        inspect.signature(made).bind(None, **config.args)
        return "it lacks log" if inspect.isclass(made) and not hasattr(made, "log") else None

    for path in config.own:
        require("tracking.use", path, "a class with a method log, called with a run and tracking.args", attempt)


class DashboardWorker:
    """One dashboard's thread and queue.

    `log`, `alert` and `samples` queue a message; they return at once and never raise. The thread opens the dashboard,
    sends the messages, and closes it after `close_all`. If it cannot be opened, all messages are discarded.
    """

    def __init__(self, name: str, options: DashboardOptions, capacity: int = QUEUE_CAPACITY) -> None:
        self.name = name
        self.dropped = 0  # messages
        self._options = options
        self._queue: queue.Queue[tuple[Any, ...]] = queue.Queue(capacity)  # a method of the dashboard, its arguments
        self._closing = threading.Event()
        self._status = "running"
        self._open_failed = False
        self._abandoned = False
        self._reported: set[str] = set()  # kinds of failures
        self._thread = threading.Thread(target=self._work, name=f"tracking-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._put("log", step, grouped(metrics))

    def alert(self, step: int, title: str, text: str) -> None:
        self._put("alert", step, title, text)

    def samples(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self._put("samples", step, name, rows)

    def begin_close(self, status: str) -> None:
        """Let the thread send the queued messages and close the dashboard. Returns at once."""
        self._status = status
        self._closing.set()

    def end_close(self, deadline: float, timeout_s: float) -> None:
        """Wait until the dashboard is closed; abandon it at the deadline (monotonic)."""
        self._thread.join(max(0.0, deadline - time.monotonic()))

        if self._thread.is_alive():
            self._options.warn(f"{self.name} did not finish within {timeout_s:g} s; the run ends without it.")
            # Errors from here on follow from the timeout, which was reported.
            self._abandoned = True
            if self.name == "wandb":
                from app.tracking.wandb import abandon

                self._guarded("could not be abandoned", abandon)
        if self.dropped:
            self._options.warn(f"{self.name} was too slow: {self.dropped} messages were dropped.")

    def _put(self, method: str, *arguments: object) -> None:
        if self._open_failed:
            return
        try:
            self._queue.put_nowait((method, *arguments))
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
            self._guarded("failed on a message", partial(_call, dashboard, *message))
        self._guarded("could not be closed", partial(_call, dashboard, "close", self._status))

    def _guarded(self, what: str, call: Callable[[], T]) -> T | None:
        """Return the call's result; return None if it fails, and report the first error of a kind."""
        try:
            return call()
        except (Exception, SystemExit) as error:  # third-party code may raise anything
            log.info("%s %s", self.name, what, exc_info=True)
            if not self._abandoned and what not in self._reported:
                self._reported.add(what)
                cause = one_line(error) if self.name in TRACKERS else error_text(error)
                self._options.warn(f"{self.name} {what}; the run continues without it: {cause}")
            return None


def _call(dashboard: Any, method: str, *arguments: Any) -> None:
    """Call a method of a dashboard. Only `log` is required."""
    if method == "log" or hasattr(dashboard, method):
        getattr(dashboard, method)(*arguments)


def close_all(workers: Sequence[DashboardWorker], status: str, timeout_s: float) -> None:
    """Close all dashboards concurrently; each has all of `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    for worker in workers:
        worker.begin_close(status)
    for worker in workers:
        worker.end_close(deadline, timeout_s)
