"""Wait for several calls at once, with one deadline and an error that names each failed call, its phase and its cause.

The first failure ends the wait. Calls that fail within a short grace period are named too: the root cause is often not
the first error to arrive (an engine that dies breaks the broadcast to its neighbors).
"""

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from app.errors import RunError, SyncError

log = logging.getLogger(__name__)
ROOT_CAUSE_GRACE_S = 0.5  # how long to collect further failures after the first one
Calls = Mapping[str, Coroutine[Any, Any, Any]]  # by the name of the engine or the ranks


@dataclass(frozen=True, slots=True)
class Deadline:
    """Awaits the calls of one sync, each phase for at most `timeout_s` seconds."""

    version: int
    timeout_s: float

    async def gather(self, phase: str, calls: Calls, *, bounded: bool = True) -> dict[str, Any]:
        """Await all calls.

        Args:
            phase: What the calls do, for the error message.
            bounded: Whether `timeout_s` applies. False for calls that enforce a deadline themselves.

        Returns:
            The results by name.

        Raises:
            SyncError: A call failed or missed the deadline. Names the phase and every call concerned. An exception
                other than `RunError` is a bug and is raised as it is.
        """
        tasks = {name: asyncio.ensure_future(call) for name, call in calls.items()}
        try:
            done, pending = await asyncio.wait(
                tasks.values(), timeout=self.timeout_s if bounded else None, return_when=asyncio.FIRST_EXCEPTION
            )
            failed = any(task.exception() for task in done)
            if failed and pending:
                await asyncio.wait(pending, timeout=ROOT_CAUSE_GRACE_S)
        finally:
            for task in tasks.values():
                task.cancel()

        if failed:
            raise self._failure(phase, tasks)
        if pending:
            late = ", ".join(name for name, task in tasks.items() if task in pending)
            raise SyncError(
                f"weight sync of policy {self.version} did not finish {phase} within weight_sync.timeout_s="
                f"{self.timeout_s:g} s: no reply from {late}"
            )
        return {name: task.result() for name, task in tasks.items()}

    def _failure(self, phase: str, tasks: Mapping[str, asyncio.Future[Any]]) -> BaseException:
        errors: dict[str, BaseException] = {}
        for name, task in tasks.items():
            error = task.exception() if task.done() and not task.cancelled() else None
            if error is not None:
                errors[name] = error

        for error in errors.values():
            if not isinstance(error, RunError):
                return error

        causes = "; ".join(_named(name, error) for name, error in errors.items())
        failure = SyncError(f"weight sync of policy {self.version} failed at {phase}: {causes}")
        failure.__cause__ = next(iter(errors.values()))
        return failure


async def best_effort(calls: Calls, timeout_s: float) -> None:
    """Best-effort cleanup with a timeout. Every `RunError` is logged, not raised."""
    tasks = {name: asyncio.ensure_future(call) for name, call in calls.items()}
    _, pending = await asyncio.wait(tasks.values(), timeout=timeout_s)

    for name, task in tasks.items():
        if task in pending:
            task.cancel()
            log.warning("cleanup after a weight sync: no reply from %s within %g s", name, timeout_s)
            continue
        error = task.exception()
        if isinstance(error, RunError):
            log.warning("cleanup after a weight sync: %s", _named(name, error))
        elif error is not None:
            raise error


def _named(name: str, error: BaseException) -> str:
    return str(error) if name in str(error) else f"{name}: {error}"
