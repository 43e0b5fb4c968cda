"""Weights & Biases, online or offline; a resumed run goes on in the same W&B run.

The key is the environment's `WANDB_API_KEY` or what `wandb login` left. Without one the run is recorded offline, which
is said, and `wandb sync` uploads it later. `tracking.offline=true` or `WANDB_MODE=offline` ask for that.
"""

import logging
import netrc
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Literal
from urllib.parse import urlparse

from app.tracking.dashboard import DashboardOptions, Progress

log = logging.getLogger("app.run")

HELPER = "wandb-core"
START_TIMEOUT_S = 60.0
EXIT_CODES = {"finished": 0, "interrupted": 130}  # W&B shows any other as failed


class WeightsAndBiases:
    """Its id and the last step sent are in `tracking/wandb.json`; W&B takes steps in order only."""

    def __init__(self, start: DashboardOptions) -> None:
        import wandb

        start.folder.mkdir(parents=True, exist_ok=True)  # W&B falls back to a temporary folder otherwise
        self._progress = Progress(start.folder.with_suffix(".json"), resumed=start.resumed_at is not None)
        run_id = self._progress.run_id or uuid.uuid4().hex[:8]
        self._run = wandb.init(
            project=start.project,
            name=start.run_name,
            id=run_id,
            resume="allow",
            dir=str(start.folder.parent),  # W&B adds its name
            config=dict(start.config),
            mode=_mode(start),
            reinit="create_new",  # a sweep's jobs share the process
            settings=wandb.Settings(
                console="off",  # the screen is ours
                silent=True,
                save_code=False,
                init_timeout=START_TIMEOUT_S,
                login_timeout=START_TIMEOUT_S,
            ),
        )
        self._progress.opened(run_id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._progress.is_new(step):
            self._run.log(dict(metrics), step=step)
            self._progress.sent(step)

    def alert(self, step: int, title: str, text: str) -> None:
        self._run.alert(title=title, text=f"step {step}: {text}", level="WARN")

    def close(self, status: str) -> None:
        self._run.summary["status"] = status
        self._run.finish(exit_code=EXIT_CODES.get(status, 1))


def abandon() -> None:
    """End W&B's helper process, which would keep ours from ending for as long as it tries to reach its server."""
    import psutil
    import wandb

    for child in psutil.Process().children():
        if child.name().startswith(HELPER):
            child.kill()
    try:
        wandb.teardown()  # the next run of this process (a sweep's) gets a new helper
    except OSError as error:
        log.info("wandb's helper was ended: %s", error)


def _mode(start: DashboardOptions) -> Literal["offline"] | None:
    """None leaves it to W&B (online, or what its own environment variables say)."""
    if start.offline:
        return "offline"
    if "WANDB_MODE" in os.environ or _has_key():
        return None
    start.warn(
        "wandb found no key, so this run is recorded offline: set WANDB_API_KEY (or tracking.offline=true to be "
        f"silent), and upload it with: wandb sync {start.folder}/offline-run-*"
    )
    return "offline"


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        return netrc.netrc(str(path)).authenticators(host) is not None
    except (FileNotFoundError, netrc.NetrcParseError):
        return False
