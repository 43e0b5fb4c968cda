"""The driver's face of the FSDP2 ranks: every call goes to all of them and is awaited with a deadline."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from app.errors import RunError, TrainerError
from app.types import ScoredGroup, StepReport, TrainerPart

STACKS_SECONDS = 10.0


class FsdpTrainer:
    """Implements `Trainer` (app/protocols.py) over Ray actors of `TrainerRank`."""

    def __init__(self, ranks: Sequence[Any], *, timeout_s: float, logs: Path):
        self.ranks, self.timeout_s, self.logs = list(ranks), timeout_s, logs

    async def setup(self) -> int:
        """Join the ranks and load the model; returns the number of parameters."""
        return (await self._all("setup", *await self.source()))[0]

    async def source(self) -> tuple[str, int]:
        """The address of rank 0 and a port that is free there."""
        return await asyncio.gather(self.ranks[0].node_address.remote(), self.ranks[0].free_port.remote())

    async def begin_step(self, *, version: int) -> None:
        await self._all("begin_step", version)

    async def train_groups(self, groups: Sequence[ScoredGroup]) -> None:
        await self._all("train_groups", ray.put(list(groups)))

    async def old_logprobs(self, groups: Sequence[ScoredGroup]) -> None:
        await self._all("old_logprobs", ray.put(list(groups)))

    async def finish_step(self) -> StepReport:
        return (await self._all("finish_step"))[0]

    async def abort_step(self) -> None:
        await self._all("abort_step")

    async def offload(self, part: TrainerPart) -> None:
        await self.call("offload", "offload", part=part)

    async def onload(self, part: TrainerPart) -> None:
        await self.call("offload", "onload", part=part)

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
        calls = {
            asyncio.ensure_future(_awaitable(getattr(rank, method).remote(*arguments))): index
            for index, rank in enumerate(self.ranks)
        }
        # the first failure ends the wait: the other ranks may be waiting for the one that failed
        done, waiting = await asyncio.wait(calls, timeout=self.timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        for call in done:
            error = call.exception()
            if error is not None:
                for other in waiting:
                    other.cancel()
                raise explained(error, f"trainer rank {calls[call]}", method)
        if waiting:
            late = sorted(calls[call] for call in waiting)
            (self.logs / "stacks.log").write_text(await self.stacks())
            raise TrainerError(
                f"trainer rank {', '.join(map(str, late))} did not finish {method} within "
                f"trainer.timeout_s={self.timeout_s:.0f} s; stacks: {self.logs / 'stacks.log'}"
            )
        return [call.result() for call in calls]


async def _awaitable(reference: Any) -> Any:
    return await reference


def explained(error: BaseException, who: str, doing: str) -> BaseException:
    """A Ray error as ours: our own sentences keep theirs, anything else keeps its traceback as cause."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, RunError):
        return cause
    if isinstance(error, RayActorError):
        return TrainerError(f"{who} died during {doing}: {str(error).splitlines()[0]}")
    told = f"{type(cause).__name__}: {cause}".splitlines()[0]
    failure = TrainerError(f"{who} failed during {doing}: {told}")
    failure.__cause__ = error
    return failure
