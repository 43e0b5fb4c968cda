"""Where the parts meet. Placement code speaks to these and to nothing behind them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from app.types import (
    Completion,
    EngineMemory,
    EngineStats,
    GroupRequest,
    InFlight,
    MemoryUse,
    ScoredGroup,
    StepReport,
    SyncReport,
    TrainerMemory,
    Trajectory,
)


class RolloutEngine(Protocol):
    """One SGLang server, owned by a host of its own that also parses its answers."""

    async def generate(self, request: GroupRequest) -> list[Completion]:
        """`group_size` completions of one prompt. Aborted ones come back partial with `FinishReason.abort`."""
        ...

    async def pause(self, in_flight: InFlight) -> None:
        """Stop sampling. `drain` returns when nothing is in flight any more."""
        ...

    async def resume(self) -> None: ...

    async def abort(self, prompt_ids: Sequence[str] | None = None) -> None:
        """End the requests of these prompts (all of them: None); their `generate` returns what there is."""
        ...

    async def release(self, part: EngineMemory) -> None: ...

    async def reload(self, part: EngineMemory) -> None: ...

    async def update(self, call: str, body: dict[str, Any]) -> dict[str, Any]:
        """Forward one step of a weight update to the server; raises `EngineError` on a refusal."""
        ...

    async def load(self) -> EngineStats: ...

    async def memory(self) -> MemoryUse:
        """Of the server that we started, and its host."""
        ...

    async def check(self) -> None:
        """Raise `EngineLost` if the server is gone or does not answer."""
        ...


class Trainer(Protocol):
    """Driver-side face of the FSDP2 ranks: a split step CLOSED → begin → OPEN → groups… → finish or abort → CLOSED."""

    async def begin_step(self, *, version: int) -> None:
        """Open the step that makes policy `version`."""
        ...

    async def add_groups(self, groups: Sequence[ScoredGroup]) -> None:
        """Feed groups; microbatches that fill their token budget are computed at once."""
        ...

    async def finish_step(self) -> StepReport:
        """Compute what is left, update, and report."""
        ...

    async def abort_step(self) -> None:
        """Forget the open step: no update, no new version. Harmless when no step is open."""
        ...

    async def version(self) -> int | None:
        """The policy that the parameters are; None in the middle of a step's updates."""
        ...

    async def memory(self) -> list[MemoryUse]:
        """Of each rank; answers also while a step is computed."""
        ...

    async def old_logprobs(self, groups: Sequence[ScoredGroup]) -> None:
        """Fix π_old of these groups at the current parameters (only where the algorithm needs it)."""
        ...

    async def offload(self, part: TrainerMemory) -> None: ...

    async def onload(self, part: TrainerMemory) -> None: ...

    async def checkpoint_bytes(self) -> int:
        """Bytes that a checkpoint takes, over all ranks."""
        ...

    async def capture(self) -> int:
        """Copy what a checkpoint holds to host memory, also while parts are offloaded; returns the bytes of all ranks.

        Only between steps, as `restore`.
        """
        ...

    async def write(self, folder: Path) -> None:
        """Write what was captured into a folder that all ranks see; steps may go on meanwhile."""
        ...

    async def restore(self, folder: Path, *, version: int) -> None:
        """Take over a checkpoint of policy `version`, of any number of ranks; nothing may be offloaded."""
        ...


class WeightSync(Protocol):
    """Carries the trainer's parameters into every engine."""

    async def push(self, version: int) -> SyncReport: ...


class Tracker(Protocol):
    """Where the numbers of a run go."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...


@runtime_checkable
class Reward(Protocol):
    """Scores trajectories; runs in killable worker processes."""

    def __call__(self, trajectories: Sequence[Trajectory]) -> Sequence[float]: ...
