"""The engine's half of `mode=parity`: start the components of a run, sync weights, and sample. No training.

The weight sync is that of a training step, with `weight_sync.verify=always`: the engine's weights are compared with an
exported checkpoint. The completions come back with the engine's log-probabilities.
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
from app.mode.session import start_rollout_workers, start_trainer_workers
from app.placement.time_sharing import TimeSharing
from app.tracking.run_folder.timeline import Timeline
from app.types import Completion, GroupRequest, Sampling
from app.utils.tasks import until_signal

PROMPT_TOKENS = 16
GROUP_SIZE = 8
MAX_TOKENS = 32
VERSION = 0


@dataclass(frozen=True, slots=True)
class Sampled:
    """A prompt and its completions, from an engine with synced weights."""

    synced: bool  # the synced weights equal the exported checkpoint
    error: str  # empty if synced
    prompt: np.ndarray  # [P] int32
    completions: Sequence[Completion]


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


def sample(config: RunConfig, folder: Path) -> Sampled:
    """Start trainer and engines, sync weights, sample, and shut down. Raises `RunError` if they fail to start."""
    verified = deepcopy(config)
    verified.weight_sync.verify = Verify.always
    return asyncio.run(until_signal(_sample(verified, folder)))


async def _sample(config: RunConfig, folder: Path) -> Sampled:
    device = device_of(config.device.kind)
    recorder = StderrRecorder()
    prompt = np.random.default_rng(0).integers(4, 60, PROMPT_TOKENS).astype(np.int32)
    request = GroupRequest("parity/0@0", prompt, GROUP_SIZE, Sampling(1.0, 1.0, MAX_TOKENS), VERSION)

    async with (
        start_rollout_workers(config, device, folder, recorder) as workers,
        start_trainer_workers(config, device, folder, workers, first=True) as made,
    ):
        recorder.status("syncing weights")
        try:
            if config.placement.kind is PlacementKind.colocate:
                devices = TimeSharing(
                    config.offload, made.trainer, workers.pool, workers.supervisor, adapters=config.serves_adapters
                )
                await devices.give_to_engines(lambda: made.synchronizer.sync(VERSION))
            else:
                await made.synchronizer.sync(VERSION)
        except SyncError as error:
            return Sampled(False, str(error), prompt, ())

        recorder.status("sampling")
        groups = await asyncio.gather(*(engine.generate(request) for engine in workers.pool.engines))
        return Sampled(True, "", prompt, [completion for group in groups for completion in group])
