"""The dashboard interface, the options that open a dashboard, and its state across resumes."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from app.utils.files import replace_file


@dataclass(frozen=True, slots=True)
class DashboardOptions:
    """What a dashboard needs to open a run."""

    config: Mapping[str, Any]  # the resolved configuration, without OmegaConf types
    folder: Path  # the dashboard's folder in the run folder; may not exist yet
    project: str
    run_name: str
    offline: bool
    resumed_at: int | None  # the step that the run resumes after; None: a new run
    warn: Callable[[str], None]


class Dashboard(Protocol):
    """An open dashboard run. All calls come from one thread; they may block and raise."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def alert(self, step: int, title: str, text: str) -> None: ...

    def close(self, status: str) -> None: ...


class Progress:
    """`tracking/<dashboard>.json`: the dashboard's run id and the last step sent, for resumed runs."""

    def __init__(self, path: Path, *, resumed: bool) -> None:
        self._path = path
        self._content = json.loads(path.read_text(encoding="utf-8")) if resumed and path.exists() else {}
        self._sent_before = int(self._content.get("last_step", -1))

    @property
    def run_id(self) -> str | None:
        """The run id of the earlier attempt; None for a new run."""
        return self._content.get("run_id")

    def opened(self, run_id: str) -> None:
        """Save the dashboard's run id."""
        self._content["run_id"] = run_id
        self._write()

    @property
    def sent_before(self) -> int:
        """The last step that an earlier attempt sent; -1 if there is none."""
        return self._sent_before

    def is_new(self, step: int) -> bool:
        """Whether no earlier attempt has sent this step."""
        return step > self._sent_before

    def sent(self, step: int) -> None:
        """Save that this step was sent."""
        if step > int(self._content.get("last_step", -1)):
            self._content["last_step"] = step
            self._write()

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self._path, json.dumps(self._content))
