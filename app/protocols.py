"""The interfaces of the components: rollout engine, trainer, weight synchronizer.

Every method may be called again after it returned. "Idempotent" means that a repeated call changes nothing. All waits
are bounded by the implementation; a missed deadline raises the component's error, which names what was awaited.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from app.types import (
    Completion,
    EngineMemory,
    EngineStart,
    EngineStats,
    GroupRequest,
    InFlight,
    MemoryUse,
    ScoredGroup,
    StepReport,
    SyncReport,
    TokenSequence,
    TrainerMemory,
)


class RolloutEngine(Protocol):
    """One SGLang server of `rollout.tensor_parallel` devices. Implemented by app/rollout/engine/remote.py:RemoteEngine.

    Lifecycle:
        1. `start` once.
        2. `generate`, any number concurrently.
        3. For a weight sync: `pause`, `update` …, `resume`.
        4. Where devices are shared: `pause`, `release` each region, later `reload` each region, `resume`.
        5. `end` once, in any state.

    Raises (every method but `end`):
        EngineLost: The server died, stalled or does not answer. The engine has to be replaced.
        EngineError: The server refused the call. The engine is still usable.
    """

    @property
    def name(self) -> str:
        """The name that messages and logs use, such as `engine 0`."""

    async def start(self, timeout_s: float) -> Mapping[str, Any]:
        """Start the server and wait until it is healthy.

        Args:
            timeout_s: Seconds until the server must answer its health check.

        Returns:
            Its `url`, SGLang's `version`, and the `pid` of its process group (None for a server of `rollout.urls`).
        """

    async def start_phase(self) -> EngineStart:
        """Return the current phase of a `start` in progress."""

    async def end(self) -> None:
        """End the server and its host process in any state. Idempotent; never raises for an engine that is gone."""

    async def generate(self, request: GroupRequest) -> list[Completion]:
        """Sample `request.group_size` completions of one prompt.

        Waits while the engine is paused. `request.name` must not be in flight already. The deadline is by progress:
        while the engine is not paused, the prompt must advance, or wait its turn, within `rollout.stall_timeout_s`.

        Returns:
            One completion for each member. Those that `abort` ended are partial, with `FinishReason.abort`.

        Raises:
            EngineLost: Also when the engine lost the requests of this or another prompt, or stopped producing tokens.
            EngineError: Also when the server aborted a completion by itself (out of memory, a time limit of its own).
                Names the prompt and the server's reason.
        """

    async def pause(self, in_flight: InFlight) -> None:
        """Stop sampling. Idempotent.

        Args:
            in_flight: `drain` returns when nothing is in flight any more; the others return at once, and requests
                continue after `resume`.
        """

    async def resume(self) -> None:
        """Continue sampling, as soon as all released memory is reloaded. Idempotent."""

    async def abort(self, prompt_ids: Sequence[str] | None = None) -> None:
        """Abort the requests of these prompts, their turns included, or all (None).

        Their `generate` returns what was sampled.
        """

    async def release(self, regions: Collection[EngineMemory]) -> None:
        """Free these regions' device memory; their content is lost. Idempotent.

        Needs a pause with `drain`, or `retract`: retracted requests keep their tokens, and continue after `resume`.

        An engine that serves adapters refuses to release the weights: no sync brings them back.
        """

    async def reload(self, regions: Collection[EngineMemory]) -> None:
        """Allocate released regions again. Weights are undefined until the next sync. Idempotent."""

    async def update(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Forward one request of a weight update to the server's `route` and return its reply."""

    async def load_adapter(self, version: int, body: Mapping[str, Any]) -> int:
        """Load the adapter of policy `version`, without a pause. Every later request is sampled with it.

        Requests in flight end with the adapter that they began with; it is unloaded once no request uses it. An engine
        that serves adapters (`model.lora`) refuses requests before its first one: the base must not answer them.

        Args:
            version: The policy version; an adapter of the same version is replaced.
            body: `lora_path`, a folder in PEFT's form that the engine can read until this returns; or `config_dict` and
                `serialized_named_tensors`, one payload for each engine rank, of SGLang's
                `/load_lora_adapter_from_tensors`.

        Returns:
            Adapters that are loaded now.
        """

    async def stats(self) -> EngineStats:
        """Return the groups in flight and the tokens sampled so far. Cheap: sends no request to the server."""

    async def memory(self) -> MemoryUse:
        """Return the memory of the server's processes and of its host process."""

    async def check(self) -> None:
        """Raise `EngineLost` unless the server's scheduler answers. Works on a paused engine too."""


class Trainer(Protocol):
    """The FSDP2 ranks as one trainer, app/trainer/remote.py:RemoteTrainer. A step is split into calls.

        CLOSED → `begin_step` → OPEN → `add_groups`, `add_demonstrations` … → `finish_step` or `abort_step` → CLOSED

    Calls are made one at a time; only `memory`, `write` and `version` may overlap with others.

    Raises (every method):
        TrainerError: A rank failed, or did not return within `trainer.timeout_s`. If `abort_step` succeeds then, the
            state of the last finished step can still be saved; in any case the ranks have to be started again.
    """

    @property
    def calls(self) -> int:
        """Calls that returned so far, which is progress for a watchdog."""

    async def begin_step(self, *, version: int) -> None:
        """Open the step that produces policy `version`. No step may be open and nothing offloaded."""

    async def old_logprobs(self, groups: Sequence[ScoredGroup]) -> None:
        """Compute π_old of these groups at the current parameters.

        Called between `begin_step` and `add_groups`, if `AlgorithmConfig.needs_old_logprobs`.
        """

    async def add_groups(self, groups: Sequence[ScoredGroup]) -> None:
        """Add groups to the open step. Microbatches that fill their token budget are computed at once."""

    async def add_demonstrations(self, sequences: Sequence[TokenSequence]) -> None:
        """Add sequences to imitate to the open step. They are computed by `finish_step`, spread over its updates."""

    async def logprobs(self, sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
        """Return log π of the sampled tokens of each sequence, [N] float32, at temperature 1.

        Between steps, or in an open step before `finish_step`: at the parameters that the step began with.
        """

    async def finish_step(self) -> StepReport:
        """Compute what is left, update the parameters and close the step."""

    async def abort_step(self) -> None:
        """Discard the open step: no update, no new version. Idempotent.

        A call in progress raises after its current microbatch, on all ranks after the same one. A step whose first
        update has begun is finished.
        """

    async def version(self) -> int | None:
        """Return the policy version of the parameters; None in the middle of a step's updates."""

    async def memory(self) -> list[MemoryUse]:
        """Return the memory of each rank. Answers while a step is computed."""

    async def offload(self, region: TrainerMemory) -> None:
        """Move a region to host memory and free it on the device. Raises if it is offloaded or a step is open."""

    async def onload(self, region: TrainerMemory) -> None:
        """Move an offloaded region back to the device. Idempotent."""

    async def checkpoint_bytes(self) -> int:
        """Return the bytes of a checkpoint, over all ranks."""

    async def capture(self) -> int:
        """Copy the checkpoint's content to host memory and return its bytes, over all ranks.

        Between steps, or in an open step before `finish_step`: the state that the step began with, without its
        gradients. Works with offloaded regions.
        """

    async def write(self, folder: Path) -> dict[str, int]:
        """Write the captured state into a folder that all ranks see. Steps may continue meanwhile.

        Returns:
            CRC-32 of each file, by name.
        """

    async def restore(self, folder: Path, *, version: int) -> None:
        """Load a checkpoint of policy `version`, written by any number of ranks. Nothing may be offloaded.

        Raises:
            CheckpointError: The checkpoint cannot be read or is of another model.
        """


class WeightSynchronizer(Protocol):
    """Copies parameters into every engine: `BucketedWeightSynchronizer`, `AdapterSynchronizer` (app/weight_sync)."""

    def set_engines(self, engines: Mapping[int, RolloutEngine]) -> None:
        """Sync into these engines, by index, from now on."""

    async def sync(self, version: int) -> SyncReport:
        """Copy the parameters into every engine as policy `version`.

        1. Gather the first bucket on the trainer.
        2. Pause the engines.
        3. Connect, if the members changed.
        4. Send and load all buckets; the last one stamps the version.
        5. Verify, if `weight_sync.verify` covers this sync.
        6. Resume the engines.

        May be called again after a failure: the retry reconnects from scratch and sends all weights.

        Raises:
            SyncError: Names engine, rank, bucket and phase. The engines stay paused: they may hold weights of two
                policies.
            TrainerError: A trainer rank failed.
        """
