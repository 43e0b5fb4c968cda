"""Weights & Biases, online or offline. A resumed run continues the same W&B run.

`tracking.offline=true` or `WANDB_MODE=offline` record offline. Otherwise W&B looks for a key (`WANDB_API_KEY`, or what
`wandb login` saved) and never prompts for one. Without a valid key the run is recorded offline, with one warning.

W&B records and sends in a helper process, `wandb-core`. It exits when the run is closed, or at once when this process
dies, and then loses what it had not written.
"""

import json
import logging
import tempfile
import threading
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from app.errors import one_line
from app.tracking.dashboards import DashboardOptions, Progress, grouped
from app.tracking.run_folder import metrics_file

log = logging.getLogger("app.run")

HELPER = "wandb-core"
START_TIMEOUT_S = 60.0
TEARDOWN_TIMEOUT_S = 5.0
EXIT_CODES = {"finished": 0, "interrupted": 130}  # W&B shows any other code as failed


class WeightsAndBiases:
    """A W&B run. `tracking/wandb.json` holds its id and the last step of an attempt that was closed.

    W&B accepts steps in increasing order only. After a resume it keeps the steps that it has, and the run sends only
    those after them: first, from `metrics.jsonl`, those that an attempt which was killed may not have delivered.
    """

    def __init__(self, options: DashboardOptions) -> None:
        import wandb

        # Without the folder W&B would fall back to a temporary one.
        options.folder.mkdir(parents=True, exist_ok=True)
        self._progress = Progress(options)
        run_id = self._progress.run_id or uuid.uuid4().hex[:8]

        start = partial(
            wandb.init,
            project=options.project,
            name=options.run_name,
            id=run_id,
            resume="allow",
            dir=str(options.folder.parent),  # W&B appends its own name
            config=dict(options.config),
            reinit="create_new",  # the jobs of a sweep share this process
            settings=wandb.Settings(
                console="off",  # the run has its own console
                silent=True,
                save_code=False,
                init_timeout=START_TIMEOUT_S,
            ),
        )

        # A silent session never prompts for a key: `init` raises `UsageError` instead.
        wandb.setup(settings=wandb.Settings(silent=True))
        try:
            # Without a mode W&B follows its environment variables.
            self._run = start(mode="offline") if options.offline else start()
        except wandb.errors.UsageError as error:
            upload = f"wandb sync {options.folder}/offline-run-*"
            options.warn(f"wandb records this run offline: {one_line(error)} To upload it, run: {upload}")
            self._run = start(mode="offline")
        # W&B's own folder for tables, made once for the process, went with an earlier job of a sweep.
        with suppress(ImportError):  # W&B names it nowhere in public
            from wandb.sdk.data_types._private import MEDIA_TMP

            if not Path(MEDIA_TMP.name).exists():
                MEDIA_TMP.name = tempfile.mkdtemp(prefix="wandb-media-")
        self._progress.opened(run_id)
        self._sent = -1  # the last step; lost if the helper process is killed before it has written it
        self._resumed_at = options.resumed_at
        if options.resumed_at is not None:
            self._resume(options, options.resumed_at)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step > self._progress.last_step:
            self._run.log(dict(metrics), step=step)
            self._sent = step
        elif step == self._resumed_at:  # an evaluation that was interrupted: its step can get no more points
            self._run.summary.update(dict(metrics))

    def _resume(self, options: DashboardOptions, resumed_at: int) -> None:
        """Send the steps up to `resumed_at` that W&B did not confirm."""
        # Online the server names the first step that it lacks: an earlier attempt may have been offline or elsewhere.
        sent = self._progress.last_step if self._run.offline else self._run.starting_step - 1
        self._progress.last_step = sent
        if sent > resumed_at:
            options.warn(
                f"wandb cannot replace steps {resumed_at + 1} to {sent}, which an earlier attempt sent: its "
                "chart keeps them. metrics.jsonl and report.html have those of this attempt."
            )
        for row in metrics_file.read(options.metrics):
            step = row.pop("step")
            if step <= resumed_at:
                self.log(step, grouped(row))

    def alert(self, step: int, title: str, text: str) -> None:
        self._run.alert(title=title, text=f"step {step}: {text}", level="WARN")

    def samples(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        if step > self._progress.last_step:
            self._run.log({f"samples/{name}": samples_table(rows)}, step=step)

    def close(self, status: str) -> None:
        import wandb

        self._run.summary["status"] = status
        self._run.finish(exit_code=EXIT_CODES.get(status, 1))  # returns when everything is written or sent
        self._progress.confirm(self._sent)
        wandb.teardown()  # the helper is of this run; the next run of this process (in a sweep) starts a new one


def samples_table(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return a `wandb.Table` of sampled trajectories, with a column for each reward component."""
    import wandb

    components = list(dict.fromkeys(name for row in rows for name in row["reward_components"]))
    rewards = [f"reward/{name}" for name in components]
    columns: list[str | int] = ["id", "prompt", "completion", "answer", "reward", *rewards]
    table = wandb.Table(columns=columns)
    for row in rows:
        answer = row["answer"] if isinstance(row["answer"], str) else json.dumps(row["answer"], ensure_ascii=False)
        values = [row["reward_components"].get(name) for name in components]
        table.add_data(row["prompt"], row["prompt_text"], row["completion"], answer, row["reward"], *values)
    return table


def abandon() -> None:
    """Kill W&B's helper process, which would block our exit for as long as it cannot reach its server."""
    import psutil

    for child in psutil.Process().children():
        if child.name().startswith(HELPER):
            child.kill()

    # A start whose helper is killed reports it to W&B, which waits for a lock that the start holds: the teardown would
    # wait for that lock, too.
    def teardown() -> None:
        import wandb

        try:
            wandb.teardown()  # the next run of this process (in a sweep) starts a new helper
        except OSError as error:
            log.info("wandb's helper process was killed: %s", error)

    thread = threading.Thread(target=teardown, name="wandb-teardown", daemon=True)
    thread.start()
    thread.join(TEARDOWN_TIMEOUT_S)
