"""What the placement code holds of tracking: one object that everything about a run is told to.

Always: `metrics.jsonl`, `summary.json` and the console have a step's numbers when `log` returns; dashboards have them
later, from a thread of their own, so that a slow or broken one neither slows nor stops training.
"""

import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from omegaconf import OmegaConf

from app.config import RunConfig
from app.errors import Interrupted
from app.tracking import dashboards
from app.tracking.alarms import Alarms
from app.tracking.console import RunConsole
from app.tracking.dashboard import DashboardOptions
from app.tracking.report import page as reports
from app.tracking.report.data import WARNINGS
from app.tracking.run_folder import metrics_file as jsonl
from app.tracking.run_folder import samples
from app.tracking.run_folder import timeline as timelines
from app.tracking.run_folder.samples import Decode
from app.tracking.run_folder.summary import Status, Summary
from app.types import Group

log = logging.getLogger("app.run")

Metrics = Mapping[str, float]
PROMPTS = "prompts.jsonl"
DASHBOARD_DEADLINE_S = {Status.finished: 30.0, Status.interrupted: 4.0, Status.failed: 4.0}


class RunFolderRecorder:
    """Records the run of `config` in `folder`, which is made if need be.

    As a context manager it ends the run by itself: finished, or interrupted or failed by what was raised.
    """

    def __init__(self, config: RunConfig, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.config, self.folder = config, folder
        self.timeline = timelines.Timeline()
        self._alarms = Alarms(max_staleness=config.placement.max_staleness)
        self._feeds: list[dashboards.DashboardWorker] | None = (
            None  # opened by the first numbers, when `resume` was called
        )
        self._resumed_at: int | None = None
        self._step = 0
        self._warned: set[str] = set()
        self._warning_lock = threading.Lock()
        self._ended = False
        self._metrics = jsonl.MetricsFile(folder / jsonl.NAME)
        self.used = self._metrics.last_step is not None  # by an earlier attempt
        self._summary = Summary(folder)
        self._summary.write()
        self._console = RunConsole(config, folder)

    def resume(self, step: int) -> None:
        """Go on after `step`: forget what an earlier attempt, or this one, recorded of later steps."""
        for feed in self._feeds or ():
            feed.close(Status.interrupted.value, DASHBOARD_DEADLINE_S[Status.failed])
        self._feeds = None
        self._resumed_at = self._step = step
        self._metrics.close()
        jsonl.cut(self.folder / jsonl.NAME, step)
        jsonl.cut(self.folder / WARNINGS, step)
        jsonl.cut(self.folder / PROMPTS, step)
        samples.cut(self.folder, step)
        self.timeline.load(self.folder)
        self._metrics = jsonl.MetricsFile(self.folder / jsonl.NAME)
        self._summary.restart()
        for row in jsonl.read(self.folder / jsonl.NAME):
            self._summary.add(row["step"], row)
        self._summary.write()
        self._console.resume(step, self._summary.values.get("eval/accuracy_first"))

    def status(self, text: str) -> None:
        """Show what the run is busy with where no step says so ("starting the engine")."""
        log.info(text)
        self._console.status(text)

    def log(self, step: int, metrics: Metrics) -> None:
        """Record the numbers of a finished step, under the names of the design (`metrics.jsonl`)."""
        self._record(step, metrics)
        self._console.step(step, metrics)
        for alarm in self._alarms.check(step, metrics):
            self.warn(alarm.text)
            for feed in self._open_feeds():
                feed.alert(step, alarm.name, f"{alarm.what} {alarm.advice}")
        self.timeline.write_if_due(self.folder)

    def log_eval(
        self,
        step: int,
        results: Mapping[str, Metrics],
        groups: Sequence[Group] = (),
        decode: Decode | None = None,
    ) -> None:
        """Record an evaluation after `step` (0: before training), by set name; they join the step's line.

        Of its groups some are kept in `samples/eval_<step>.jsonl`.
        """
        samples.write_samples(self.folder, step, groups, self.config.tracking.samples_per_step, decode, kind="eval")
        self._record(step, evaluation_metrics(results))
        self._console.log_eval(step, results)

    def log_prompts(self, step: int, *, trained: Sequence[str], filtered: Sequence[str]) -> None:
        """Enter the ids of a step's prompts in `prompts.jsonl`: what was trained on, and what taught nothing."""
        with (self.folder / PROMPTS).open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"step": step, "trained": [*trained], "filtered": [*filtered]}) + "\n")

    def log_samples(self, step: int, groups: Sequence[Group], decode: Decode | None = None) -> None:
        """Keep `tracking.samples_per_step` trajectories of a step; `decode` turns prompt tokens into the question."""
        samples.write_samples(self.folder, step, groups, self.config.tracking.samples_per_step, decode)

    def warn(self, text: str) -> None:
        """Say it once on the screen, in the log and in the report, however often it is called with this text."""
        with self._warning_lock:  # dashboards warn from their threads
            if text in self._warned:
                return
            self._warned.add(text)
            path = self.folder / WARNINGS
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps({"time": round(time.time(), 1), "step": self._step, "text": text}) + "\n")
        log.warning(text)

    def finish(self, status: Status | str, error: str | None = None) -> None:
        """End the run: the last files are written, dashboards closed, and the screen says where things are. Once."""
        if self._ended:
            return
        self._ended = True
        status = Status(status)
        self._metrics.close()
        self._summary.end(status, error)
        self._summary.write()
        self.timeline.write(self.folder)
        deadline = time.monotonic() + DASHBOARD_DEADLINE_S[status]
        for feed in self._feeds or ():
            feed.close(status.value, max(0.1, deadline - time.monotonic()))
        files = self._report()
        totals = {**self._summary.values, "total/seconds": self._summary.seconds}
        self._console.end(status.value, totals, error, {**files, "timeline": self.folder / timelines.NAME})

    def __enter__(self) -> "RunFolderRecorder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish(Status.finished)
        elif isinstance(error, (KeyboardInterrupt, Interrupted)):
            self.finish(Status.interrupted, str(error) or "Ctrl-C")
        else:
            self.finish(Status.failed, f"{type(error).__name__}: {error}")

    def _record(self, step: int, metrics: Metrics) -> None:
        self._step = step
        self._metrics.append(step, metrics)
        self._summary.add(step, metrics)
        self._summary.write()
        for feed in self._open_feeds():
            feed.log(step, metrics)

    def _open_feeds(self) -> list[dashboards.DashboardWorker]:
        if self._feeds is None:
            self._feeds = [dashboards.DashboardWorker(name, self._start(name)) for name in self.config.tracking.use]
        return self._feeds

    def _start(self, name: str) -> DashboardOptions:
        tracking = self.config.tracking
        plain = OmegaConf.to_container(OmegaConf.structured(self.config), enum_to_str=True)
        assert isinstance(plain, dict)
        return DashboardOptions(
            config={str(key): value for key, value in plain.items()},
            folder=self.folder / dashboards.FOLDER / name,
            project=tracking.project,
            run_name=tracking.run_name or f"{self.folder.parent.name}/{self.folder.name}",
            offline=tracking.offline,
            resumed_at=self._resumed_at,
            warn=self.warn,
        )

    def _report(self) -> dict[str, Path]:
        try:
            return {"report": reports.write_report([self.folder], self.folder / reports.NAME)}
        except Exception as error:  # the run is over and its record is whole: a page about it must not make it fail
            log.exception("report.html could not be made")
            self.warn(f"report.html could not be made ({error}): logs/driver.log has the details.")
            return {}


def evaluation_metrics(results: Mapping[str, Metrics]) -> dict[str, float]:
    """One set gives `eval/<name>`; several give `eval/<set>/<name>`, and `eval/accuracy` is their mean."""
    if len(results) == 1:
        return {f"eval/{name}": value for metrics in results.values() for name, value in metrics.items()}
    named = {f"eval/{key}/{name}": value for key, metrics in results.items() for name, value in metrics.items()}
    accuracies = [metrics["accuracy"] for metrics in results.values() if "accuracy" in metrics]
    return {**named, "eval/accuracy": sum(accuracies) / len(accuracies)} if accuracies else named
