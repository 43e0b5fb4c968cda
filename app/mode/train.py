"""The trainer's lives within one run: each begins at the last checkpoint, or at the beginning, and ends with the run or
with the trainer's death.

    trainer up → restore → push → train … → finished
         ↑ engines forget what is in flight ← trainer lost (up to recovery.max_restarts times)

A resumed run is the same thing with everything else new as well.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.checkpoint.export import export_trained
from app.checkpoint.manager import Checkpoints, require_model
from app.cluster.memory_monitor import Memory
from app.config import RunConfig
from app.config.placement import PlacementKind
from app.device import Device
from app.errors import RunError, TrainerError, TrainerLost
from app.placement.colocate import Colocate
from app.placement.context import Parts
from app.placement.controller import CURSOR, Conductor
from app.placement.fully_async import FullyAsync
from app.placement.time_sharing import Turns
from app.recovery.resume import checkpoint_of
from app.tracking.recorder import RunRecorder
from app.types import TrainerPart
from app.weight_sync.synchronizer import Push

if TYPE_CHECKING:
    from app.mode.session import RolloutSide

STORIES: dict[PlacementKind, type[Conductor]] = {
    PlacementKind.colocate: Colocate,
    PlacementKind.fully_async: FullyAsync,
}


async def live(config: RunConfig, device: Device, folder: Path, recorder: RunRecorder, side: "RolloutSide") -> float:
    """Train to the end; returns the last evaluation's accuracy."""
    checkpoints = Checkpoints(folder, config.checkpoint.keep, timeout_s=config.trainer.timeout_s)
    beginning = side.prepared.prompts.train.state()
    restarts = 0
    lost: TrainerLost | None = None
    while True:
        try:
            async with trainer_side(config, device, folder, side, first=restarts == 0) as (trainer, sync):
                if config.checkpoint.every and restarts == 0:
                    checkpoints.prepare(await trainer.checkpoint_bytes())
                parts = _parts(config, recorder, side, checkpoints, trainer)
                version = await _stand(parts, beginning, afresh=restarts == 0)
                if lost is not None:  # said now, since what was recorded after the checkpoint is forgotten
                    recorder.warn(
                        f"the trainer was lost and began again after step {version} (restart {restarts} of "
                        f"recovery.max_restarts={config.recovery.max_restarts}): {lost}"
                    )
                side.recovery.attach(trainer, sync, version)
                try:
                    return await _run(STORIES[config.placement.kind](parts, version), side, folder)
                except TrainerError as error:
                    await sync.abandon()
                    if isinstance(error, TrainerLost) or trainer.broken:
                        raise TrainerLost(str(error)) from error
                    raise
        except TrainerLost as error:
            restarts, lost = restarts + 1, error
            if not config.checkpoint.every or restarts > config.recovery.max_restarts:
                raise
            recorder.doing("the trainer was lost; starting it again")
            await side.recovery.forget()


async def _run(story: Conductor, side: "RolloutSide", folder: Path) -> float:
    config, recorder = story.config, story.parts.recorder
    async with side.recovery.watching():
        try:
            accuracy = await story.run()
        except asyncio.CancelledError:
            await story.leave()
            raise
        except RunError:
            await story.parts.checkpoints.settle(story.config.checkpoint.grace_s)
            raise
        await story.parts.checkpoints.wait()
    if config.checkpoint.export:
        recorder.doing("exporting the model")
        await export_trained(story.parts.trainer, config, folder)
    return accuracy


async def _stand(parts: Parts, beginning: dict[str, Any], *, afresh: bool) -> int:
    """Put trainer, prompts and records where the run goes on; returns the policy's version.

    `afresh`: with the driver's first trainer, whose records of this life are empty.
    """
    named = checkpoint_of(parts.config.resume) if afresh else None
    point = named or parts.checkpoints.latest()
    if point is None:
        if not afresh or parts.recorder.used:
            parts.cursor.restore(beginning)
            parts.recorder.resume(0)
        return 0
    state = parts.checkpoints.read_state(point)
    require_model(state, parts.model, point)
    parts.recorder.doing(f"going on after step {state.step}, from {point}")
    await parts.trainer.restore(point, version=state.version)
    parts.checkpoints.rewind(point)
    parts.cursor.restore(state.extra[CURSOR])
    parts.recorder.resume(state.step)
    return state.version


@asynccontextmanager
async def trainer_side(
    config: RunConfig, device: Device, folder: Path, side: "RolloutSide", *, first: bool
) -> AsyncIterator[tuple[Any, Push]]:
    """The ranks and their sync; both ended when the block is left. The engines are started with the first ones."""
    from app.cluster.actors import make_trainer
    from app.mode.session import together
    from app.offload.trainer import Offload
    from app.weight_sync.factory import make_sync

    async with contextlib.AsyncExitStack() as stack:
        trainer = make_trainer(config, device, side.prepared.model_path, folder, side.reservation)
        stack.callback(_kill_ranks, trainer)
        starts = side.starts(config.rollout.start_timeout_s) if first else []
        if config.placement.kind is PlacementKind.colocate and device.shares_memory:
            turns = Turns(config.offload, trainer, side.pool)
            if not first:
                await turns.engines_leave()
            await trainer.setup()
            await trainer.attach("offload", partial(Offload, moves=device.shares_memory))
            if first:  # an engine takes what it finds free
                await turns.trainer_leaves(TrainerPart)
                await together(*starts)
                await turns.engines_leave()
                await turns.trainer_returns(TrainerPart)
        else:
            await together(trainer.setup(), *starts)
            await trainer.attach("offload", partial(Offload, moves=device.shares_memory))
        sync = make_sync(config, device, trainer, side.pool.engines, folder)
        stack.push_async_callback(sync.close)
        await sync.prepare()
        yield trainer, sync


def _kill_ranks(trainer: Any) -> None:
    import ray

    for rank in trainer.ranks:
        ray.kill(rank)


def _parts(
    config: RunConfig, recorder: RunRecorder, side: "RolloutSide", checkpoints: Checkpoints, trainer: Any
) -> Parts:
    from app.model.hf_directory import identity

    prompts = side.prepared.prompts
    return Parts(
        config=config,
        trainer=trainer,
        pool=side.pool,
        sync=side.recovery,
        sampler=side.sampler,
        cursor=prompts.train,
        evals=prompts.evals,
        recorder=recorder,
        checkpoints=checkpoints,
        memory=Memory(trainer, side.pool),
        model=identity(side.prepared.model_path),
    )
