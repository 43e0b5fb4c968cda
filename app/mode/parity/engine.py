"""The engine's half of `mode=parity`: start the components of a run, sync weights, and sample. No training.

The weight sync is that of a training step, with `weight_sync.verify=always`: the engine's weights are compared with an
exported checkpoint. The completions come back with the engine's log-probabilities. Several versions are synced and
sampled, one after the other: with LoRA two of random adapters, otherwise the checkpoint, the checkpoint with noise and
the checkpoint again. Only the first two syncs load the export too, so the last one shows what a sync alone refreshes.

Noise moves each entry by `NOISE` of itself: an engine that computes with something that it derived from earlier weights
is then off by more than rounding. In bfloat16 an old copy has to change more than rounding does. Of SmolLM2-135M, with
30 layers, old output projections of attention shift a log-probability by 0.02 at a noise of 1 % and by 0.1 at 5 %,
rounding by 0.04 at both and by 0.17 at 10 %. Of a random Qwen3.5 of 24 layers old convolutions shift it by 0.4 at 5 %,
rounding by 0.05.
"""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from app.config import RunConfig
from app.config.weight_sync import Verify
from app.errors import SyncError
from app.model.load import reload
from app.model.lora.layer import randomize, seeded
from app.model.lora.names import adapter_tensors
from app.model.policy import PolicyModel, named_checkpoint_tensors
from app.model.sharding import local_shard, own_rows
from app.placement.time_sharing import TimeSharing
from app.start.inputs import RunInputs
from app.start.session import RolloutWorkers, TrainerWorkers, start_rollout_workers, start_trainer_workers
from app.tracking.run_folder.timeline import Timeline
from app.types import Completion, GroupRequest, Sampling
from app.utils.tasks import until_signal

PROMPT_TOKENS = 16
GROUP_SIZE = 8
MAX_TOKENS = 32
ADAPTER_SEEDS = (1, 2)  # of the adapters of the policy versions 0 and 1
SEEDS = (None, 1, None)  # without adapters: of the noise of the versions 0 to 2; None: the checkpoint
EXTENSION = "versions"
NOISE = 0.05


@dataclass(frozen=True, slots=True)
class Sampled:
    """A prompt and its completions, from an engine with synced weights."""

    prompt: np.ndarray  # [P] int32
    completions: Sequence[Completion]
    seed: int | None = None  # of its weights; None: the checkpoint
    error: str = ""  # of a sync after which the engine's weights differ from the exported checkpoint


@dataclass
class StderrRecorder:
    """Status and warnings on stderr, for a run without metrics."""

    timeline: Timeline = field(default_factory=Timeline)

    def status(self, text: str) -> None:
        sys.stderr.write(f"{text} …\n")

    warn = status

    def note(self, text: str, facts: Mapping[str, str | int] | None = None) -> None:
        self.status(text)


def sample(config: RunConfig, folder: Path, inputs: RunInputs) -> list[Sampled]:
    """Start trainer and engines, sync each version, sample it, and shut down. `RunError` if they do not start."""
    verified = deepcopy(config)
    verified.weight_sync.verify = Verify.always
    return asyncio.run(until_signal(_sample(verified, folder, inputs)))


async def _sample(config: RunConfig, folder: Path, inputs: RunInputs) -> list[Sampled]:
    seeds: Sequence[int | None] = ADAPTER_SEEDS if config.model.lora.enabled else SEEDS

    async with (
        start_rollout_workers(config, folder, inputs, StderrRecorder()) as workers,
        start_trainer_workers(folder, workers, first=True) as training,
    ):
        await training.trainer.attach(EXTENSION, Versions)
        sampled: list[Sampled] = []
        for version, seed in enumerate(seeds):
            sampled.append(await _sample_version(workers, training, version, seed))
            if sampled[-1].error:
                break
        return sampled


async def _sample_version(workers: RolloutWorkers, training: TrainerWorkers, version: int, seed: int | None) -> Sampled:
    config = workers.config
    prompt = np.random.default_rng(0).integers(4, 60, PROMPT_TOKENS).astype(np.int32)
    request = GroupRequest(f"parity/{version}@0", prompt, GROUP_SIZE, Sampling(1.0, 1.0, MAX_TOKENS), version)
    adapters = config.model.lora.enabled
    devices = TimeSharing(config.offload, training.trainer, workers.pool, workers.supervisor, adapters=adapters)
    colocated = config.placement.colocated

    if colocated and version:
        await devices.give_to_trainer()
    if version or seed is not None:
        await training.trainer.call(EXTENSION, Versions.set, seed=seed)
    workers.recorder.status("syncing weights")
    try:
        if colocated:
            await devices.give_to_engines(lambda: training.synchronizer.sync(version))
        else:
            await training.synchronizer.sync(version)
    except SyncError as error:
        return Sampled(prompt, (), seed, str(error))

    workers.recorder.status("sampling")
    groups = await asyncio.gather(*(engine.generate(request) for engine in workers.pool.engines))
    return Sampled(prompt, [completion for group in groups for completion in group], seed)


class Versions:
    """An extension of a trainer rank that sets the weights of a version."""

    def __init__(self, trainer_rank: Any):
        self.rank = trainer_rank

    def set(self, seed: int | None) -> None:
        """Set the weights of a seed; None: those of the checkpoint."""
        spec = self.rank.spec
        if not spec.lora.enabled:
            reload(self.rank.model, spec.model_path)
        if seed is not None:
            set_weights(self.rank.model, seed, getattr(torch, spec.dtype.name))


@torch.no_grad()
def set_weights(policy: PolicyModel, seed: int, dtype: torch.dtype) -> None:
    """Set random adapters; without adapters, add noise to the checkpoint's weights and round them to `dtype`."""
    if any(adapter_tensors(policy)):
        randomize(policy.causal_lm, seed)
        return
    for name, parameter in named_checkpoint_tensors(policy):
        # each entry times 1 ± `NOISE`: the product of random signs of its row and of its place in the row
        generator, shape = seeded(f"{seed}/{name}"), parameter.shape
        rows, places = (torch.randint(0, 2, part, generator=generator) * 2.0 - 1 for part in (shape[:1], shape[1:]))
        own = rows[own_rows(parameter)] if isinstance(parameter, DTensor) else rows

        shard = local_shard(parameter)
        shard.mul_(1 + NOISE * own.view(-1, *[1] * places.dim()).to(shard) * places.to(shard))
        shard.copy_(shard.to(dtype))  # as the engine has them: its rounding of the noise is not an error of the engine
