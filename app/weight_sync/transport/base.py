"""The transport interface, and waits for several calls of a sync with one deadline.

`BucketedWeightSynchronizer` is transport-agnostic.
"""

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from app.errors import RunError, SyncError
from app.protocols import RolloutEngine
from app.trainer.remote import RemoteTrainer
from app.weight_sync.buckets import ReadyBucket

if TYPE_CHECKING:
    from app.weight_sync.sender import Sender

log = logging.getLogger(__name__)
ROOT_CAUSE_GRACE_S = 0.5  # how long to collect further failures after the first one
Calls = Mapping[str, Coroutine[Any, Any, Any]]  # by the name of the engine or the ranks
TRAINER_RANKS = "trainer ranks"  # their name in messages
SENDER_EXTENSION: Final = "weight_sync"  # the name of each trainer rank's `Sender` or `AdapterSender`


@dataclass(frozen=True, slots=True)
class Deadline:
    """Awaits the calls of one sync, each phase for at most `timeout_s` seconds.

    The first failure ends the wait. Calls that fail within a short grace period are named too: the root cause is often
    not the first error to arrive (an engine that dies breaks the broadcast to its neighbors).
    """

    version: int
    timeout_s: float

    async def gather(self, phase: str, calls: Calls, *, bounded: bool = True) -> dict[str, Any]:
        """Await all calls; return the results by name.

        Args:
            bounded: Whether `timeout_s` applies. False for calls that enforce a deadline themselves.

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
        ended = {name: task for name, task in tasks.items() if task.done() and not task.cancelled()}
        errors = {name: error for name, task in ended.items() if (error := task.exception()) is not None}
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


class Transport(Protocol):
    """Carries buckets from the trainer ranks to the engines.

    Lifecycle:
        1. `connect` before the first bucket of each sync.
        2. `request_body` for each bucket and engine, while the sender's `send` runs on the trainer ranks.
        3. `abort` after a failure or a change of engines; the next `connect` starts from scratch.

    Attributes:
        sender: The extension of the trainer ranks.
        route: The server's route for one bucket.
    """

    @property
    def sender(self) -> "type[Sender]": ...

    @property
    def route(self) -> str: ...

    async def connect(self, deadline: Deadline, trainer: RemoteTrainer, engines: Sequence[RolloutEngine]) -> bool:
        """Connect the trainer ranks and the engines; return whether they were connected already."""

    def request_body(self, engine_index: int, ready: Sequence[ReadyBucket]) -> dict[str, Any]:
        """Return the request body for one engine. `ready`: the gathered bucket, by trainer rank."""

    async def abort(self, trainer: RemoteTrainer) -> None:
        """Disconnect both sides in any state, within a few seconds. Idempotent."""
