"""The engine's half of `mode=parity`: the run's own parts, put together as for a run, but no training.

A real engine starts, the trainer's parameters are pushed into it as in every step (and compared there with an exported
checkpoint, `weight_sync.verify=always`), it samples, and the log-probabilities that it reports are compared with those
that the reference gives the same tokens: on a CPU, in float32.
"""

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import numpy as np

from app.config import RunConfig
from app.config.placement import PlacementKind
from app.config.weight_sync import Verify
from app.device import device_of
from app.errors import SyncError
from app.mode.session import start_rollout_workers, start_trainer_workers
from app.placement.time_sharing import OPTIMIZER_STATE, TimeSharing
from app.tracking.run_folder.timeline import Timeline
from app.types import Completion, GroupRequest, Sampling, TrainerMemory
from app.utils.tasks import until_signal

PROMPT_TOKENS, GROUP_SIZE, MAX_TOKENS, VERSION = 16, 8, 32, 0


@dataclass(frozen=True, slots=True)
class Sampled:
    """What came of it."""

    pushed: bool  # the push equals the exported checkpoint
    told: str  # why not
    prompt: np.ndarray  # [P] int32
    completions: Sequence[Completion]


@dataclass
class StderrRecorder:
    """As much of a recorder as the parts need."""

    timeline: Timeline = field(default_factory=Timeline)

    def status(self, text: str) -> None:
        sys.stderr.write(f"{text} …\n")

    warn = status


def sample(config: RunConfig, folder: Path) -> Sampled:
    """Start a trainer and engines, push, sample, end them. Raises `RunError` where they cannot be started."""
    checked = deepcopy(config)
    checked.weight_sync.verify = Verify.always
    return asyncio.run(until_signal(_sample(checked, folder)))


async def _sample(config: RunConfig, folder: Path) -> Sampled:
    device, recorder = device_of(config.device.kind), StderrRecorder()
    prompt = np.random.default_rng(0).integers(4, 60, PROMPT_TOKENS).astype(np.int32)
    request = GroupRequest("parity/0@0", prompt, GROUP_SIZE, Sampling(1.0, 1.0, MAX_TOKENS), VERSION)
    async with contextlib.AsyncExitStack() as stack:
        side = await stack.enter_async_context(start_rollout_workers(config, device, folder, recorder))  # type: ignore[arg-type]
        trainer, sync = await stack.enter_async_context(start_trainer_workers(config, device, folder, side, first=True))
        shared = config.placement.kind is PlacementKind.colocate
        turns = TimeSharing(config.offload, trainer, side.pool)
        if shared:
            await turns.offload_trainer(OPTIMIZER_STATE)
            await turns.weights_return()
        recorder.status("pushing")
        try:
            await sync.sync(VERSION)
        except SyncError as error:
            return Sampled(False, str(error), prompt, ())
        if shared:
            await turns.offload_trainer([TrainerMemory.parameters])
            await turns.reload_kv_cache()
        recorder.status("sampling")
        groups = await asyncio.gather(*(engine.generate(request) for engine in side.pool.engines))
        return Sampled(True, "", prompt, [completion for group in groups for completion in group])


def mean_difference(path: Path, sampled: Sampled, *, trust_remote_code: bool) -> float:
    """Mean absolute difference between the engine's log-probabilities and the reference's, nats."""
    import torch

    from app.model.load import load

    model = load(path, mesh=None, device=torch.device("cpu"), trust_remote_code=trust_remote_code)
    rows = [np.concatenate([sampled.prompt, each.token_ids]) for each in sampled.completions]
    borders = [0, *accumulate(map(len, rows))]
    tokens = torch.as_tensor(np.concatenate(rows), dtype=torch.int64)
    logit_positions = torch.cat(
        [torch.arange(a + PROMPT_TOKENS - 1, a + len(row) - 1) for a, row in zip(borders, rows, strict=False)]
    )
    with torch.no_grad():
        logprobs, _ = model(
            input_ids=tokens[None],
            position_ids=torch.cat([torch.arange(len(row)) for row in rows])[None],
            cu_seqlens=torch.tensor(borders, dtype=torch.int32),
            logit_positions=logit_positions,
            targets=tokens[logit_positions + 1],
            temperature=1.0,
        )
    told = np.concatenate([each.logprobs for each in sampled.completions])
    return float(np.abs(told - logprobs.numpy()).mean())
