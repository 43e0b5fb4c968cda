"""The dashboard interface, the options that open a dashboard, and its state across resumes."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.utils.files import replace_file


@dataclass(frozen=True, slots=True)
class DashboardOptions:
    """What a dashboard needs to open a run: the first argument of a tracker of the user's own."""

    config: Mapping[str, Any]  # the resolved configuration, without OmegaConf types
    folder: Path  # the dashboard's folder in the run folder; may not exist yet
    metrics: Path  # the run's metrics.jsonl
    project: str
    run_name: str
    offline: bool
    resumed_at: int | None  # the step that the run resumes after; None: a new run
    warn: Callable[[str], None]  # shows a warning and adds it to the report
    args: Mapping[str, Any] = field(default_factory=dict)  # of a tracker of the user's own


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
    """`tracking/<dashboard>.json`: the dashboard's run id and the last step that it confirmed, for resumed runs.

    Attributes:
        held: The last step that the dashboard has from earlier attempts; -1 if there is none.
    """

    def __init__(self, path: Path, *, resumed: bool) -> None:
        self._path = path
        self._content = json.loads(path.read_text(encoding="utf-8")) if resumed and path.exists() else {}
        self.held = int(self._content.get("last_step", -1))

    @property
    def run_id(self) -> str | None:
        """The run id of the earlier attempt; None for a new run."""
        return self._content.get("run_id")

    def opened(self, run_id: str) -> None:
        """Save the dashboard's run id."""
        self._content["run_id"] = run_id
        self._write()

    def confirm(self, step: int) -> None:
        """Save that the dashboard has every step up to this one, which was sent: it may lose it until then."""
        self._content["last_step"] = max(self.held, step)
        self._write()

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self._path, json.dumps(self._content))
