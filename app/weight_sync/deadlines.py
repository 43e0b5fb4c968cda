"""Waiting for several answers at once, with one deadline and an error that says who, where and what.

Always holds: the first failure ends the wait; whoever failed in the same moment is named too, since the cause is often
not the first to be heard (an engine that dies takes the broadcast of its neighbours along).
"""

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from app.errors import RunError, SyncError

log = logging.getLogger(__name__)
ROOT_CAUSE_GRACE_S = 0.5  # how long further failures are listened for after the first one
Work = Mapping[str, Coroutine[Any, Any, Any]]  # who → what they do


@dataclass(frozen=True, slots=True)
class Deadline:
    """The waits of one push."""

    version: int
    timeout_s: float

    async def gather(self, phase: str, work: Work, *, deadline: bool = True) -> dict[str, Any]:
        """Everyone's result. Raises `SyncError` naming who failed, or who did not answer in time, and the phase."""
        tasks = {who: asyncio.ensure_future(each) for who, each in work.items()}
        try:
            done, waiting = await asyncio.wait(
                tasks.values(), timeout=self.timeout_s if deadline else None, return_when=asyncio.FIRST_EXCEPTION
            )
            failed = any(task.exception() for task in done)
            if failed and waiting:
                await asyncio.wait(waiting, timeout=ROOT_CAUSE_GRACE_S)
        finally:
            for task in tasks.values():
                task.cancel()
        if failed:
            raise self._failure(phase, tasks)
        if waiting:
            late = ", ".join(who for who, task in tasks.items() if task in waiting)
            raise SyncError(
                f"push of policy {self.version} did not pass {phase} within weight_sync.timeout_s="
                f"{self.timeout_s:g} s: no answer from {late}"
            )
        return {who: task.result() for who, task in tasks.items()}

    def _failure(self, phase: str, tasks: Mapping[str, asyncio.Future[Any]]) -> BaseException:
        finished = {who: task for who, task in tasks.items() if task.done() and not task.cancelled()}
        errors = {who: error for who, task in finished.items() if (error := task.exception()) is not None}
        bug = next((error for error in errors.values() if not isinstance(error, RunError)), None)
        if bug is not None:
            return bug
        said = "; ".join(_named(who, error) for who, error in errors.items())
        failure = SyncError(f"push of policy {self.version} failed at {phase}: {said}")
        failure.__cause__ = next(iter(errors.values()))
        return failure


async def best_effort(work: Work, seconds: float) -> None:
    """Try what may fail, for so long at most; refusals are logged, since what they were asked may not exist."""
    tasks = {who: asyncio.ensure_future(each) for who, each in work.items()}
    _, waiting = await asyncio.wait(tasks.values(), timeout=seconds)
    for who, task in tasks.items():
        task.cancel()
        if task in waiting:
            log.warning("gave up waiting for %s", who)
        elif isinstance(error := task.exception(), RunError):
            log.warning("giving up: %s", _named(who, error))
        elif error is not None:
            raise error


def _named(who: str, error: BaseException) -> str:
    return str(error) if who in str(error) else f"{who}: {error}"
