"""The driver's face of the FSDP2 ranks: every call goes to all of them and is awaited with a deadline."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import ray
from ray.exceptions import RayActorError, RayTaskError

from app.errors import RunError, TrainerError, one_line
from app.trainer.rank import MemoryOffload, TrainerRank
from app.types import MemoryUse, ScoredGroup, StepReport, TrainerMemory

P = ParamSpec("P")
T = TypeVar("T")
STACKS_SECONDS = 10.0
SETTLE_SECONDS = 5.0  # within which ranks that are not stuck answer after another one's failure
CONCURRENT = (
    TrainerRank.write,
    TrainerRank.memory,
)  # runs in a thread of its own: its failure says nothing about the calls in the queue


class RemoteTrainer:
    """Implements `Trainer` (app/protocols.py) over Ray actors of `TrainerRank`."""

    def __init__(self, ranks: Sequence[Any], *, timeout_s: float, logs: Path):
        self.ranks, self.timeout_s, self.logs = list(ranks), timeout_s, logs
        self._broken: str | None = None

    @property
    def broken(self) -> bool:
        """Whether a rank died or is stuck, so that all of them have to be made anew. Every call is refused then."""
        return self._broken is not None

    async def setup(self) -> int:
        """Join the ranks and load the model; returns the number of parameters."""
        return (await self._all(TrainerRank.setup, *await self.source()))[0]

    async def source(self) -> tuple[str, int]:
        """The address of rank 0 and a port that is free there."""
        return await asyncio.gather(self.ranks[0].node_address.remote(), self.ranks[0].free_port.remote())

    async def begin_step(self, *, version: int) -> None:
        await self._all(TrainerRank.begin_step, version)

    async def add_groups(self, groups: Sequence[ScoredGroup]) -> None:
        await self._all(TrainerRank.add_groups, _shared(groups))

    async def old_logprobs(self, groups: Sequence[ScoredGroup]) -> None:
        await self._all(TrainerRank.old_logprobs, _shared(groups))

    async def finish_step(self) -> StepReport:
        return (await self._all(TrainerRank.finish_step))[0]

    async def abort_step(self) -> None:
        await self._all(TrainerRank.abort_step)

    async def version(self) -> int | None:
        versions = set(await self._all(TrainerRank.version))
        return versions.pop() if len(versions) == 1 else None

    async def memory(self) -> list[MemoryUse]:
        return await self._all(TrainerRank.memory)

    async def offload(self, region: TrainerMemory) -> None:
        await self._all(TrainerRank.offload, region)

    async def onload(self, region: TrainerMemory) -> None:
        await self._all(TrainerRank.onload, region)

    async def checkpoint_bytes(self) -> int:
        return sum(await self._all(TrainerRank.checkpoint_bytes))

    async def capture(self) -> int:
        return sum(await self._all(TrainerRank.capture))

    async def write(self, folder: Path) -> None:
        await self._all(TrainerRank.write, folder)

    async def restore(self, folder: Path, *, version: int) -> None:
        await self._all(TrainerRank.restore, folder, version)

    async def attach_offload(self, make: Callable[[TrainerRank], MemoryOffload]) -> None:
        """Set who offloads each rank's memory: `make(rank)`."""
        await self._all(TrainerRank.attach_offload, make)

    async def attach(self, name: str, make: Callable[[TrainerRank], object]) -> None:
        """Add an extension to every rank: `make(rank)`, under this name."""
        await self._all(TrainerRank.attach, name, make)

    async def call(
        self, extension: str, method: Callable[Concatenate[Any, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """Call a method of an extension on every rank; the results in rank order."""
        return await self._all(TrainerRank.call, extension, method.__name__, args, kwargs)

    async def stacks(self) -> str:
        """The stacks of all ranks that still answer."""
        pending = [asyncio.wait_for(_awaitable(rank.stacks.remote()), STACKS_SECONDS) for rank in self.ranks]
        answers = await asyncio.gather(*pending, return_exceptions=True)
        return "\n".join(
            answer if isinstance(answer, str) else f"--- rank {rank}: no answer ({answer!r})"
            for rank, answer in enumerate(answers)
        )

    async def _all(
        self, method: Callable[Concatenate[TrainerRank, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """Call a method on every rank; the results in rank order."""
        name = method.__name__
        if self._broken is not None:
            raise TrainerError(f"{name}: the trainer cannot go on, {self._broken}")
        calls = self._ask(method, *args, **kwargs)
        done, waiting = await asyncio.wait(calls, timeout=self.timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        failed = [call for call in done if call.exception() is not None]
        if failed:
            raise await self._failure(method, calls, failed[0])
        if waiting:
            late = sorted(calls[call] for call in waiting)
            (self.logs / "stacks.log").write_text(await self.stacks())
            self._broken = f"since trainer rank {_listed(late)} did not finish {name} in time"
            raise TrainerError(
                f"trainer rank {_listed(late)} did not finish {name} within "
                f"trainer.timeout_s={self.timeout_s:.0f} s; stacks: {self.logs / 'stacks.log'}"
            )
        return [call.result() for call in calls]

    def _ask(
        self, method: Callable[Concatenate[TrainerRank, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> dict["asyncio.Future[T]", int]:
        """The call on every rank → its rank."""
        references = [getattr(rank, method.__name__).remote(*args, **kwargs) for rank in self.ranks]
        return {asyncio.ensure_future(_awaitable(reference)): rank for rank, reference in enumerate(references)}

    async def _failure(
        self, method: Callable[..., Any], calls: dict["asyncio.Future[Any]", int], first: Any
    ) -> BaseException:
        """What to raise when a rank failed, after it was found out whether the others wait for it for ever.

        A rank that died is named before those whose collective broke off because of it.
        """
        probes = {} if method in CONCURRENT else self._ask(TrainerRank.ready)
        await asyncio.wait([*calls, *probes], timeout=SETTLE_SECONDS)
        stuck = {rank for call, rank in (calls | probes).items() if not call.done()}
        for call in (*calls, *probes):
            call.cancel()
        answers = [(rank, call.exception()) for call, rank in (*probes.items(), *calls.items()) if call.done()]
        died = sorted({rank for rank, error in answers if isinstance(error, RayActorError)})
        culprit = died[0] if died else calls[first]
        if died or stuck:
            self._broken = f"since trainer rank {culprit} {'died' if died else 'failed'} during {method.__name__}"
        error = dict(answers)[culprit] or first.exception()
        return explained(error, f"trainer rank {culprit}", method.__name__)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _shared(groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
    """Serialize the groups once for all ranks. Ray resolves the reference on each rank."""
    return cast(Sequence[ScoredGroup], ray.put(list(groups)))


async def _awaitable(reference: Any) -> Any:
    return await reference


def explained(error: BaseException, who: str, status: str) -> BaseException:
    """A Ray error as ours: our own sentences keep theirs, anything else keeps its traceback as cause."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, RunError):
        return cause
    if isinstance(error, RayActorError):
        return TrainerError(f"{who} died during {status}: {one_line(error)}")
    told = f"{type(cause).__name__}: {cause}".splitlines()[0]
    failure = TrainerError(f"{who} failed during {status}: {told}")
    failure.__cause__ = error
    return failure
