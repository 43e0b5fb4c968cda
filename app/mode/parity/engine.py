"""The engine's half of `mode=parity`: start the components of a run, sync weights, and sample. No training.

The weight sync is that of a training step, with `weight_sync.verify=always`: the engine's weights are compared with an
exported checkpoint. The completions come back with the engine's log-probabilities. Several versions are synced and
sampled, one after the other: with LoRA two of random adapters, otherwise the checkpoint, the checkpoint with noise and
the checkpoint again. Only the first two syncs load the export too, so the last one shows what a sync alone refreshes.
"""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from app.config import RunConfig
from app.config.placement import PlacementKind
from app.config.weight_sync import Verify
from app.device import device_of
from app.errors import SyncError
from app.mode.parity.weights import Versions
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


@dataclass(frozen=True, slots=True)
class Sampled:
    """A prompt and its completions, from an engine with synced weights."""

    synced: bool  # the synced weights equal the exported checkpoint
    error: str  # empty if synced
    prompt: np.ndarray  # [P] int32
    completions: Sequence[Completion]
    seed: int | None = None  # of its weights, see `weights.py`; None: the checkpoint


@dataclass
class StderrRecorder:
    """Status and warnings on stderr, for a run without metrics."""

    timeline: Timeline = field(default_factory=Timeline)

    def status(self, text: str) -> None:
        """Show what the run is doing."""
        sys.stderr.write(f"{text} …\n")

    warn = status

    def note(self, text: str, facts: Mapping[str, str | int] | None = None) -> None:
        """Show something to know about the run; there is no summary for the facts."""
        self.status(text)


def sample(config: RunConfig, folder: Path, inputs: RunInputs) -> list[Sampled]:
    """Start trainer and engines, sync each version, sample it, and shut down.

    Raises:
        RunError: They fail to start.
    """
    verified = deepcopy(config)
    verified.weight_sync.verify = Verify.always
    return asyncio.run(until_signal(_sample(verified, folder, inputs)))


async def _sample(config: RunConfig, folder: Path, inputs: RunInputs) -> list[Sampled]:
    device = device_of(config.device.kind)
    recorder = StderrRecorder()
    seeds: Sequence[int | None] = ADAPTER_SEEDS if config.model.lora.enabled else SEEDS

    async with (
        start_rollout_workers(config, device, folder, inputs, recorder) as workers,
        start_trainer_workers(config, device, folder, workers, first=True) as made,
    ):
        await made.trainer.attach(EXTENSION, Versions)
        sampled: list[Sampled] = []
        for version, seed in enumerate(seeds):
            sampled.append(await _sample_version(config, workers, made, recorder, version, seed))
            if not sampled[-1].synced:
                break
        return sampled


async def _sample_version(
    config: RunConfig,
    workers: RolloutWorkers,
    made: TrainerWorkers,
    recorder: StderrRecorder,
    version: int,
    seed: int | None,
) -> Sampled:
    prompt = np.random.default_rng(0).integers(4, 60, PROMPT_TOKENS).astype(np.int32)
    request = GroupRequest(f"parity/{version}@0", prompt, GROUP_SIZE, Sampling(1.0, 1.0, MAX_TOKENS), version)
    adapters = config.model.lora.enabled
    devices = TimeSharing(config.offload, made.trainer, workers.pool, workers.supervisor, adapters=adapters)
    colocated = config.placement.kind is PlacementKind.colocate

    if colocated and version:
        await devices.give_to_trainer()
    if version or seed is not None:
        await made.trainer.call(EXTENSION, Versions.set, seed=seed)
    recorder.status("syncing weights")
    try:
        if colocated:
            await devices.give_to_engines(lambda: made.synchronizer.sync(version))
        else:
            await made.synchronizer.sync(version)
    except SyncError as error:
        return Sampled(False, str(error), prompt, (), seed)

    recorder.status("sampling")
    groups = await asyncio.gather(*(engine.generate(request) for engine in workers.pool.engines))
    return Sampled(True, "", prompt, [completion for group in groups for completion in group], seed)
