"""The recorder of a run: its folder, console, alarms and dashboards behind one object.

Invariant: `metrics.jsonl`, `summary.json` and the console have a step's metrics when `log` returns. Dashboards get them
later, on their own threads, so that a slow or broken dashboard neither slows nor stops training.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson
from omegaconf import OmegaConf

from app.config import RunConfig
from app.errors import Interrupted
from app.stop import stop_reason
from app.tracking import dashboards
from app.tracking.console import RunConsole
from app.tracking.rules import Alarms
from app.tracking.run_folder import CONFIG, PROMPTS, WARNINGS, metrics_file, samples, set_later_aside, summary, timeline
from app.tracking.run_folder.samples import Decode
from app.tracking.run_folder.summary import Status, Summary
from app.types import Group
from app.utils.files import append, describe, sync

log = logging.getLogger("app.run")

Metrics = Mapping[str, float]
SAMPLES_EVERY = 10  # training steps between two tables of samples in the dashboards; every evaluation has one
TABLE_ROWS = 64  # at most
DASHBOARD_DEADLINE_S = {Status.finished: 30.0, Status.interrupted: 4.0, Status.failed: 4.0}


class RunFolderRecorder:
    """Records the run of `config` in `folder`, which is created.

    Lifecycle: `resume` (to continue an earlier attempt, or after a trainer restart), then `log`, `log_samples` and
    `log_prompts` for every step. The end of the context writes the last files, closes the dashboards and prints the
    outcome: finished, or interrupted or failed depending on the exception.

    Example:
        with RunFolderRecorder(config, folder) as recorder:
            with recorder.timeline.span("driver", "train", step=1):
                ...
            recorder.log(1, {"reward/mean": 0.5, "time/step": 1.0})
    """

    def __init__(self, config: RunConfig, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.config = config
        self.folder = folder
        self.timeline = timeline.Timeline()
        # Opened with the first metrics, because `resume` decides how.
        self._dashboards: list[dashboards.DashboardWorker] | None = None
        self._resumed_at: int | None = None
        self._step = 0
        self._warned: dict[str, int] = {}  # text → step
        self._warning_lock = threading.Lock()
        self._kept: Mapping[str, str] = {}  # for the last lines
        self._summary = Summary(folder)
        self._open_records()  # also of an earlier attempt, so that a resume that fails at its start keeps the totals
        self.used = self._metrics.last_step is not None  # whether an earlier attempt left metrics
        self._console = RunConsole(config, folder)

    def resume(self, step: int) -> None:
        """Continue after `step`: set the records of later steps aside, of an earlier attempt or of this one."""
        dashboards.close_all(self._dashboards or (), Status.interrupted.value, DASHBOARD_DEADLINE_S[Status.failed])
        self._dashboards = None
        self._resumed_at = step
        with self._warning_lock:  # the warnings of later steps are set aside: the same problem is to be reported again
            self._warned = {text: warned for text, warned in self._warned.items() if warned <= step}
            self._step = step

        self._metrics.close()
        moved = set_later_aside(self.folder, step)
        self._open_records()
        self._console.resume(step, self._summary.values.get("eval/accuracy_first"))
        if moved is not None:
            self.note(f"the records of later steps are in {moved}")

    def note(self, text: str, facts: Mapping[str, str | int | float] | None = None) -> None:
        """Show and log a fact about this run, and add `facts` to `summary.json`."""
        log.info(text)
        self._console.note(text)
        if facts:
            self._summary.facts.update(facts)
            self._summary.write()

    def keep(self, lines: Mapping[str, str], facts: Mapping[str, str | int | float]) -> None:
        """Add `lines` about what the run has kept to its last ones on the screen, and `facts` to `summary.json`."""
        self._kept = {**self._kept, **lines}
        self._summary.facts.update(facts)

    @property
    def accuracy(self) -> float:
        """The accuracy of the run's last evaluation, of an earlier attempt too; 0 without one."""
        return summary.accuracy(self._summary.values)

    @property
    def stop_reason(self) -> str | None:
        """Why the run ends early, after the step recorded last, by its evaluations; None to go on."""
        step = int(self._summary.values["steps"])
        return stop_reason(self.config.stop, self._summary.accuracies, step=step, last_step=self.config.steps)

    def status(self, text: str) -> None:
        log.info(text)
        self._console.status(text)

    def log(self, step: int, metrics: Metrics) -> None:
        """Record the metrics of a finished step and warn about the alarms that it raises."""
        self._record(step, metrics)
        self._console.step(step, metrics)
        self._raise_alarms(step, metrics)
        self._try(timeline.NAME, partial(self.timeline.write_if_due, self.folder))

    def log_eval(
        self, step: int, results: Mapping[str, Metrics], groups: Sequence[Group] = (), decode: Decode | None = None
    ) -> None:
        """Record an evaluation after `step` (0: before training); its metrics join the step's line.

        Some of the groups are written to `samples/eval_<step>.jsonl`; `decode` turns prompt tokens into text.
        """
        self.log_samples(step, groups, decode, kind="eval")
        metrics = evaluation_metrics(results)
        self._record(step, metrics)
        self._console.log_eval(step, results)
        self._raise_alarms(step, metrics)

    def log_prompts(
        self, step: int, *, trained: Sequence[str], filtered: Sequence[str], unplayable: Sequence[str] = ()
    ) -> None:
        """Append the ids of a step's trained and filtered prompts to `prompts.jsonl`.

        `unplayable` are those of `filtered` whose environments failed; the others had equal rewards.
        """
        reasons = {"unplayable": [*unplayable]} if unplayable else {}
        line = {"step": step, "trained": [*trained], "filtered": [*filtered], **reasons}
        append(self.folder / PROMPTS, json.dumps(line) + "\n")

    def log_samples(self, step: int, groups: Sequence[Group], decode: Decode | None = None, kind: str = "step") -> None:
        """Write `tracking.samples_per_step` trajectories of a step; `decode` turns prompt tokens into the question."""
        count = self.config.tracking.samples_per_step
        self._try("samples", partial(samples.write_samples, self.folder, step, groups, count, decode, kind=kind))
        if kind == "eval" or step % SAMPLES_EVERY == 0:
            self._try("the table of samples", partial(self._send_samples, step, groups, decode, kind))

    def flush(self) -> None:
        """Flush metrics and prompt ids to disk, so that a checkpoint never outlives the records of its steps."""
        for path in (self.folder / metrics_file.NAME, self.folder / PROMPTS, self.folder):
            if path.exists():
                sync(path)

    def warn(self, text: str) -> None:
        """Warn on the console, in the log and in the report. Repeated texts are ignored. Thread-safe."""
        with self._warning_lock:
            if text in self._warned:
                return
            self._warned[text] = self._step

            path = self.folder / WARNINGS
            with suppress(OSError):  # the log below has it too
                path.parent.mkdir(parents=True, exist_ok=True)
                line = {"time": round(time.time(), 1), "step": self._step, "text": text}
                append(path, json.dumps(line) + "\n")

        log.warning(text)

    def __enter__(self) -> "RunFolderRecorder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        status, message = Status.finished, None
        if isinstance(error, (KeyboardInterrupt, Interrupted)):
            status, message = Status.interrupted, str(error) or "Ctrl-C"
        elif error is not None:
            status, message = Status.failed, f"{type(error).__name__}: {error}"

        self._metrics.close()
        self._summary.end(status, message)
        unsaved: OSError | None = None
        try:
            self._summary.write()
        except OSError as problem:
            unsaved = problem
            self.warn(f"{self.folder / summary.NAME} still says that the run is running: {describe(problem)}")

        self._try(timeline.NAME, partial(self.timeline.write, self.folder))
        written = {"timeline": self.folder / timeline.NAME} if (self.folder / timeline.NAME).exists() else {}
        dashboards.close_all(self._dashboards or (), status.value, DASHBOARD_DEADLINE_S[status])

        from app.tracking.report.page import NAME, unhealthy, write_report

        totals = {**self._summary.values, "total/seconds": self._summary.seconds}
        report = self.folder / NAME
        reported = self._try(NAME, partial(write_report, self.folder, report))
        shown: dict[str, Path | str] = {**unhealthy(self.folder), "report": report} if reported else {}
        self._console.end(status.value, totals, {**shown, **written, **self._kept})
        if unsaved is not None and status is Status.finished:
            raise unsaved

    def _open_records(self) -> None:
        """Open `metrics.jsonl`, and take summary and alarms from its rows."""
        path = self.folder / metrics_file.NAME
        self._metrics = metrics_file.MetricsFile(path)
        self._alarms = Alarms(max_staleness=self.config.placement.max_staleness)
        self._summary.reset()
        for row in metrics_file.read(path):
            self._summary.add(row["step"], row)
            self._alarms.check(row["step"], row)
        self._summary.write()

    def _record(self, step: int, metrics: Metrics) -> None:
        self._step = step
        self._metrics.append(step, metrics)
        self._summary.add(step, metrics)
        self._summary.write()
        for dashboard in self._open_dashboards():
            dashboard.log(step, metrics)

    def _raise_alarms(self, step: int, metrics: Metrics) -> None:
        for name, text in self._alarms.check(step, metrics).items():
            self.warn(f"step {step}: {text}")
            for dashboard in self._open_dashboards():
                dashboard.alert(step, name, text)

    def _send_samples(self, step: int, groups: Sequence[Group], decode: Decode | None, kind: str) -> None:
        open_dashboards = self._open_dashboards()
        chosen = samples.choose(groups, min(self.config.tracking.samples_per_step, TABLE_ROWS))
        if not open_dashboards or not chosen:
            return
        rows = [orjson.loads(samples.line(samples.row(trajectory, decode))) for trajectory in chosen]
        for dashboard in open_dashboards:
            dashboard.samples(step, kind, rows)

    def _try(self, what: str, write: Callable[[], object]) -> bool:
        """Write something for people to read, and return whether it was. A failure does not end the run."""
        try:
            write()
            return True
        except OSError as error:
            self.warn(f"{what} could not be written: {describe(error)}")
        except Exception as error:
            log.exception("%s could not be written", what)
            self.warn(f"{what} could not be written ({type(error).__name__}): see logs/driver.log.")
        return False

    def _open_dashboards(self) -> list[dashboards.DashboardWorker]:
        if self._dashboards is None:
            names = self.config.tracking.use
            self._dashboards = [dashboards.DashboardWorker(name, self._options(name)) for name in names]
        return self._dashboards

    def _options(self, name: str) -> dashboards.DashboardOptions:
        tracking = self.config.tracking
        # The file has references in place of values of environment variables.
        saved = self.folder / CONFIG / "config.yaml"
        settings = OmegaConf.load(saved) if saved.is_file() else OmegaConf.structured(self.config)
        config: Any = OmegaConf.to_container(settings, enum_to_str=True)
        return dashboards.DashboardOptions(
            config=config,
            folder=self.folder / dashboards.FOLDER / name,
            metrics=self.folder / metrics_file.NAME,
            project=tracking.project,
            run_name=dashboards.run_name(tracking, self.folder),
            offline=tracking.offline,
            resumed_at=self._resumed_at,
            warn=self.warn,
            args=tracking.args,
        )


def evaluation_metrics(results: Mapping[str, Metrics]) -> dict[str, float]:
    """Name the metrics of one set `eval/<name>`; of several, `eval/<set>/<name>`, and `eval/accuracy` is their mean."""
    if len(results) == 1:
        return {f"eval/{name}": value for metrics in results.values() for name, value in metrics.items()}
    named = {f"eval/{key}/{name}": value for key, metrics in results.items() for name, value in metrics.items()}
    named["eval/accuracy"] = sum(metrics["accuracy"] for metrics in results.values()) / len(results)
    errors = [metrics["accuracy_stderr"] for metrics in results.values() if "accuracy_stderr" in metrics]
    if len(errors) == len(results):
        named["eval/accuracy_stderr"] = sum(error**2 for error in errors) ** 0.5 / len(results)
    return named
