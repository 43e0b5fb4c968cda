"""What a dashboard is: what it is opened with, what it is sent, and what of it survives a resume."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class DashboardOptions:
    """What a dashboard is opened with."""

    config: Mapping[str, Any]  # the resolved configuration, plain
    folder: Path  # the dashboard's own, in the run folder; not made yet
    project: str
    run_name: str
    offline: bool
    resumed_at: int | None  # the run goes on after this step; None: it is new
    warn: Callable[[str], None]


class Dashboard(Protocol):
    """One open dashboard run. Calls come from one thread; they may block and raise."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def alert(self, step: int, title: str, text: str) -> None: ...

    def close(self, status: str) -> None: ...


class Progress:
    """`<dashboard>.json` in the run folder: the dashboard's run id and the last step it was sent."""

    def __init__(self, path: Path, *, resumed: bool) -> None:
        self._path = path
        self._content = json.loads(path.read_text(encoding="utf-8")) if resumed and path.exists() else {}
        self._sent_before = int(self._content.get("last_step", -1))

    @property
    def run_id(self) -> str | None:
        return self._content.get("run_id")

    def opened(self, run_id: str) -> None:
        self._content["run_id"] = run_id
        self._write()

    def is_new(self, step: int) -> bool:
        """Whether an earlier attempt has not sent this step yet."""
        return step > self._sent_before

    def sent(self, step: int) -> None:
        if step > int(self._content.get("last_step", -1)):
            self._content["last_step"] = step
            self._write()

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(self._content), encoding="utf-8")
        part.replace(self._path)
