"""The driver's face of the FSDP2 ranks: every call goes to all of them and is awaited with a deadline."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from app.errors import RunError, TrainerError
from app.types import MemoryUse, ScoredGroup, StepReport, TrainerMemory

STACKS_SECONDS = 10.0
SETTLE_SECONDS = 5.0  # within which ranks that are not stuck answer after another one's failure
CONCURRENT = ("write", "memory")  # runs in a thread of its own: its failure says nothing about the calls in the queue


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
        return (await self._all("setup", *await self.source()))[0]

    async def source(self) -> tuple[str, int]:
        """The address of rank 0 and a port that is free there."""
        return await asyncio.gather(self.ranks[0].node_address.remote(), self.ranks[0].free_port.remote())

    async def begin_step(self, *, version: int) -> None:
        await self._all("begin_step", version)

    async def add_groups(self, groups: Sequence[ScoredGroup]) -> None:
        await self._all("add_groups", ray.put(list(groups)))

    async def old_logprobs(self, groups: Sequence[ScoredGroup]) -> None:
        await self._all("old_logprobs", ray.put(list(groups)))

    async def finish_step(self) -> StepReport:
        return (await self._all("finish_step"))[0]

    async def abort_step(self) -> None:
        await self._all("abort_step")

    async def version(self) -> int | None:
        versions = set(await self._all("version"))
        return versions.pop() if len(versions) == 1 else None

    async def memory(self) -> list[MemoryUse]:
        return await self._all("memory")

    async def offload(self, part: TrainerMemory) -> None:
        await self.call("offload", "offload", part=part)

    async def onload(self, part: TrainerMemory) -> None:
        await self.call("offload", "onload", part=part)

    async def checkpoint_bytes(self) -> int:
        return sum(await self._all("checkpoint_bytes"))

    async def capture(self) -> int:
        return sum(await self._all("capture"))

    async def write(self, folder: Path) -> None:
        await self._all("write", folder)

    async def save(self, folder: Path) -> None:
        """Capture and write, one after the other; `Checkpoints` (app/checkpoint/manager.py) does it beside training."""
        await self.capture()
        await self.write(folder)

    async def restore(self, folder: Path, *, version: int) -> None:
        await self._all("restore", folder, version)

    async def attach(self, name: str, make: Callable[..., Any]) -> None:
        """Give every rank a further part."""
        await self._all("attach", name, make)

    async def call(self, part: str, method: str, /, **arguments: Any) -> list[Any]:
        """Call a part on every rank; the answers in rank order."""
        return await self._all("call", part, method, arguments)

    async def stacks(self) -> str:
        """The stacks of all ranks that still answer."""
        pending = [asyncio.wait_for(_awaitable(rank.stacks.remote()), STACKS_SECONDS) for rank in self.ranks]
        answers = await asyncio.gather(*pending, return_exceptions=True)
        return "\n".join(
            answer if isinstance(answer, str) else f"--- rank {rank}: no answer ({answer!r})"
            for rank, answer in enumerate(answers)
        )

    async def _all(self, method: str, *arguments: Any) -> list[Any]:
        if self._broken is not None:
            raise TrainerError(f"{method}: the trainer cannot go on, {self._broken}")
        calls = self._ask(method, *arguments)
        done, waiting = await asyncio.wait(calls, timeout=self.timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        failed = [call for call in done if call.exception() is not None]
        if failed:
            raise await self._failure(method, calls, failed[0])
        if waiting:
            late = sorted(calls[call] for call in waiting)
            (self.logs / "stacks.log").write_text(await self.stacks())
            self._broken = f"since trainer rank {_listed(late)} did not finish {method} in time"
            raise TrainerError(
                f"trainer rank {_listed(late)} did not finish {method} within "
                f"trainer.timeout_s={self.timeout_s:.0f} s; stacks: {self.logs / 'stacks.log'}"
            )
        return [call.result() for call in calls]

    def _ask(self, method: str, *arguments: Any) -> dict["asyncio.Future[Any]", int]:
        """The call on every rank → its rank."""
        references = [getattr(rank, method).remote(*arguments) for rank in self.ranks]
        return {asyncio.ensure_future(_awaitable(reference)): rank for rank, reference in enumerate(references)}

    async def _failure(self, method: str, calls: dict["asyncio.Future[Any]", int], first: Any) -> BaseException:
        """What to raise when a rank failed, after it was found out whether the others wait for it for ever.

        A rank that died is named before those whose collective broke off because of it.
        """
        probes = {} if method in CONCURRENT else self._ask("ready")
        await asyncio.wait([*calls, *probes], timeout=SETTLE_SECONDS)
        stuck = {rank for call, rank in (calls | probes).items() if not call.done()}
        for call in (*calls, *probes):
            call.cancel()
        answers = [(rank, call.exception()) for call, rank in (*probes.items(), *calls.items()) if call.done()]
        died = sorted({rank for rank, error in answers if isinstance(error, RayActorError)})
        culprit = died[0] if died else calls[first]
        if died or stuck:
            self._broken = f"since trainer rank {culprit} {'died' if died else 'failed'} during {method}"
        error = dict(answers)[culprit] or first.exception()
        return explained(error, f"trainer rank {culprit}", method)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


async def _awaitable(reference: Any) -> Any:
    return await reference


def explained(error: BaseException, who: str, status: str) -> BaseException:
    """A Ray error as ours: our own sentences keep theirs, anything else keeps its traceback as cause."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, RunError):
        return cause
    if isinstance(error, RayActorError):
        return TrainerError(f"{who} died during {status}: {str(error).splitlines()[0]}")
    told = f"{type(cause).__name__}: {cause}".splitlines()[0]
    failure = TrainerError(f"{who} failed during {status}: {told}")
    failure.__cause__ = error
    return failure
