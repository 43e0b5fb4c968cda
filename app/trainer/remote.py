"""The driver's proxy of the FSDP2 ranks: every call goes to all ranks and has a deadline."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import numpy as np
import ray
from ray.exceptions import RayActorError, RayError

from app.errors import TrainerError, one_line
from app.trainer.rank import TrainerRank
from app.types import Group, MemoryUse, Prompt, ScoredGroup, StepReport, TokenSequence, TrainerMemory, Trajectory
from app.utils.ray_calls import last_ray_error, reply, run_error

P = ParamSpec("P")
T = TypeVar("T")
STACKS_TIMEOUT_S = 10.0
ROOT_CAUSE_GRACE_S = 5.0  # after a failure: a rank that does not return by then is stuck
# These run in their own thread: their failure does not affect queued calls.
CONCURRENT = (
    TrainerRank.write,
    TrainerRank.memory,
    TrainerRank.interrupt,
    TrainerRank.hold_passes,
    TrainerRank.end_passes,
)


class RemoteTrainer:
    """`Trainer` (app/protocols.py) over Ray actors of `TrainerRank`.

    Lifecycle: `setup`, then `attach`, then the calls of `Trainer`. Once a rank died or is stuck, every call raises:
    create new actors.

    Args:
        ranks: The actors, in rank order.
        timeout_s: Deadline of one call.
        logs: Folder for `stacks.log`, written when a call misses its deadline.

    Attributes:
        calls: Calls that returned so far.
    """

    def __init__(self, ranks: Sequence[Any], *, timeout_s: float, logs: Path):
        self.ranks = list(ranks)
        self.timeout_s = timeout_s
        self.logs = logs
        self.calls = 0
        self.broken: str | None = None  # why no further call is possible

    async def setup(self) -> str | None:
        """Join the ranks and load the model. Returns the attention kernels where the device has a choice of them."""
        return (await self._each(TrainerRank.setup, *await self.source()))[0]

    async def source(self) -> tuple[str, int]:
        """Wait until Ray has started all ranks; return the address of rank 0 and the port of the rendezvous there."""
        return (await self._each(TrainerRank.start))[0]

    async def begin_step(self, *, version: int) -> None:
        await self._each(TrainerRank.begin_step, version)

    async def add_groups(self, groups: Sequence[ScoredGroup]) -> None:
        await self._each(TrainerRank.add_groups, _shared(groups))

    async def add_demonstrations(self, sequences: Sequence[TokenSequence]) -> None:
        await self._each(TrainerRank.add_demonstrations, sequences)

    async def logprobs(self, sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
        return (await self._each(TrainerRank.logprobs, sequences))[0]

    async def old_logprobs(self, groups: Sequence[ScoredGroup]) -> None:
        await self._each(TrainerRank.old_logprobs, _shared(groups))

    async def finish_step(self) -> StepReport:
        return (await self._each(TrainerRank.finish_step))[0]

    async def abort_step(self) -> None:
        begun = await self._each(TrainerRank.hold_passes)
        await self._each(TrainerRank.end_passes, max(begun))
        await self._each(TrainerRank.abort_step)

    async def version(self) -> int | None:
        versions = set(await self._each(TrainerRank.version))
        return versions.pop() if len(versions) == 1 else None

    async def memory(self) -> list[MemoryUse]:
        return await self._each(TrainerRank.memory)

    async def offload(self, region: TrainerMemory) -> None:
        await self._each(TrainerRank.offload, region)

    async def onload(self, region: TrainerMemory) -> None:
        await self._each(TrainerRank.onload, region)

    async def checkpoint_bytes(self) -> int:
        return sum(await self._each(TrainerRank.checkpoint_bytes))

    async def capture(self) -> int:
        return sum(await self._each(TrainerRank.capture))

    async def write(self, folder: Path) -> dict[str, int]:
        written = await self._each(TrainerRank.write, folder)
        return {name: crc32 for files in written for name, crc32 in files.items()}

    async def restore(self, folder: Path, *, version: int) -> None:
        await self._each(TrainerRank.restore, folder, version)

    async def attach(self, name: str, make: Callable[[TrainerRank], object]) -> None:
        """Attach `make(rank)` as an extension of every rank, under this name."""
        await self._each(TrainerRank.attach, name, make)

    async def call(
        self, extension: str, method: Callable[Concatenate[Any, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """Call a method of an extension on every rank. Returns the results in rank order."""
        return await self._each(TrainerRank.call, extension, method.__name__, args, kwargs)

    async def interrupt(
        self, extension: str, method: Callable[Concatenate[Any, P], None], /, *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Call a method of an extension on every rank, concurrently with a call in progress, to end its waiting."""
        await self._each(TrainerRank.interrupt, extension, method.__name__, args, kwargs)

    async def stacks(self) -> str:
        """Return the stacks of all ranks that still answer."""
        pending = [asyncio.wait_for(reply(rank.stacks.remote()), STACKS_TIMEOUT_S) for rank in self.ranks]
        answers = await asyncio.gather(*pending, return_exceptions=True)
        return "\n".join(
            answer if isinstance(answer, str) else f"--- rank {rank}: no answer ({answer!r})"
            for rank, answer in enumerate(answers)
        )

    async def _each(
        self, method: Callable[Concatenate[TrainerRank, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """Call a method on every rank. Returns the results in rank order."""
        name = method.__name__
        if self.broken is not None:
            raise TrainerError(f"{name}: the trainer cannot continue, {self.broken}")

        references = [getattr(rank, name).remote(*args, **kwargs) for rank in self.ranks]
        calls: dict[asyncio.Future[T], int] = {_task(reference): rank for rank, reference in enumerate(references)}
        done, waiting = await asyncio.wait(calls, timeout=self.timeout_s, return_when=asyncio.FIRST_EXCEPTION)

        failed = [call for call in done if call.exception() is not None]
        if failed:
            raise await self._failure(method, calls, failed[0])

        if waiting:
            late = ", ".join(str(rank) for rank in sorted(calls[call] for call in waiting))
            for call in waiting:  # their results are not read
                call.cancel()
            if method is TrainerRank.start:
                self.broken = f"since Ray did not start trainer rank {late} in time"
                raise TrainerError(
                    f"Ray did not start trainer rank {late} within trainer.timeout_s={self.timeout_s:.0f} s: "
                    f"its devices are not free, or its process did not start or does not answer{last_ray_error()}"
                )
            if method not in CONCURRENT:
                self.broken = f"since trainer rank {late} did not finish {name} in time"
            stacks = await self.stacks()
            with contextlib.suppress(OSError):  # a full disk must not hide the error below
                (self.logs / "stacks.log").write_text(stacks, encoding="utf-8")
            raise TrainerError(
                f"trainer rank {late} did not finish {name} within trainer.timeout_s={self.timeout_s:.0f} s; "
                f"stacks: {self.logs / 'stacks.log'}"
            )
        self.calls += 1
        return [call.result() for call in calls]

    async def _failure(
        self, method: Callable[..., Any], calls: dict["asyncio.Future[Any]", int], first: "asyncio.Future[Any]"
    ) -> BaseException:
        """Return the error of the root cause, and mark the trainer broken if a rank died or is stuck.

        A dead rank breaks the collectives of the others, whose errors may come first. It is the root cause.
        """
        await asyncio.wait(calls, timeout=ROOT_CAUSE_GRACE_S)
        stuck = [call for call in calls if not call.done()]
        for call in stuck:
            call.cancel()

        errors = {rank: call.exception() for call, rank in calls.items() if call not in stuck}
        died = sorted(rank for rank, error in errors.items() if isinstance(error, RayActorError))
        culprit = died[0] if died else calls[first]
        # A step that could not be aborted leaves FSDP2 in the middle of a pass: its parameters cannot be saved.
        unusable = method is TrainerRank.abort_step or (stuck and method not in CONCURRENT)
        if died or unusable:
            self.broken = f"since trainer rank {culprit} {'died' if died else 'failed'} during {method.__name__}"

        error = errors[culprit]
        assert error is not None
        return run_error(error, f"trainer rank {culprit}", method.__name__, failed=TrainerError, lost=TrainerError)


def _shared(groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
    """Serialize the groups once for all ranks. Ray resolves the reference on each rank."""
    try:
        return cast(Sequence[ScoredGroup], ray.put(slim(groups)))
    except RayError as error:
        failed = f"{len(groups)} groups could not be put into Ray's object store"
        raise TrainerError(f"{failed}: {type(error).__name__}: {one_line(error)}") from error


def _task(reference: Any) -> asyncio.Future[Any]:
    """Return a task whose failure asyncio does not report when its caller was cancelled meanwhile."""
    task = asyncio.ensure_future(reply(reference))
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


def slim(groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
    """Return the groups with what `make_samples` reads: a rank needs no text, row, score or reward.

    Pickled, their arrays travel out of band, without a copy.
    """
    found = []
    for scored in groups:
        prompt = Prompt(scored.group.prompt.id, scored.group.prompt.token_ids, "", "")
        members = tuple(_slim(prompt, each) for each in scored.group.trajectories)
        found.append(ScoredGroup(Group(prompt, members), scored.advantages))
    return found


def _slim(prompt: Prompt, trajectory: Trajectory) -> Trajectory:
    episode = trajectory.episode and replace(trajectory.episode, turns=(), scores={}, metrics={})
    return Trajectory(prompt, trajectory.completion, "", episode=episode)
