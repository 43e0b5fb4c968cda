"""The trainer's lives within one run: each begins at the last checkpoint, or at the beginning, and ends with the run or
with the trainer's death.

    trainer up → restore → push → train … → finished
         ↑ engines forget what is in flight ← trainer lost (up to recovery.max_restarts times)

A resumed run is the same thing with everything else new as well.
"""

import asyncio
from pathlib import Path
from typing import Any

from app.checkpoint.export import export_trained
from app.checkpoint.manager import Checkpoints, require_model
from app.cluster.memory_monitor import MemoryMonitor
from app.config import Mode, RunConfig
from app.config.placement import PlacementKind
from app.device import Device, device_of
from app.errors import RunError, TrainerError, TrainerLost
from app.mode.session import RolloutWorkers, start_rollout_workers, start_trainer_workers
from app.placement.colocate import Colocate
from app.placement.context import RunContext
from app.placement.controller import CURSOR, PlacementController
from app.placement.fully_async import FullyAsync
from app.recovery.resume import checkpoint_of, run_lock
from app.tracking.recorder import RunFolderRecorder
from app.utils.tasks import gather_or_raise, until_signal

CONTROLLERS: dict[PlacementKind, type[PlacementController]] = {
    PlacementKind.colocate: Colocate,
    PlacementKind.fully_async: FullyAsync,
}


async def live(
    config: RunConfig, device: Device, folder: Path, recorder: RunFolderRecorder, side: RolloutWorkers
) -> float:
    """Train to the end; returns the last evaluation's accuracy."""
    checkpoints = Checkpoints(folder, config.checkpoint.keep, timeout_s=config.trainer.timeout_s)
    beginning = side.prepared.prompts.train.state()
    restarts = 0
    lost: TrainerLost | None = None
    while True:
        try:
            async with start_trainer_workers(config, device, folder, side, first=restarts == 0) as (trainer, sync):
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
                    return await _run(CONTROLLERS[config.placement.kind](parts, version), side, folder)
                except TrainerError as error:
                    await sync.abort()
                    if isinstance(error, TrainerLost) or trainer.broken:
                        raise TrainerLost(str(error)) from error
                    raise
        except TrainerLost as error:
            restarts, lost = restarts + 1, error
            if not config.checkpoint.every or restarts > config.recovery.max_restarts:
                raise
            recorder.status("the trainer was lost; starting it again")
            await side.recovery.forget()


async def _run(story: PlacementController, side: RolloutWorkers, folder: Path) -> float:
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
        recorder.status("exporting the model")
        await export_trained(story.parts.trainer, config, folder)
    return accuracy


async def _stand(parts: RunContext, beginning: dict[str, Any], *, afresh: bool) -> int:
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
    parts.recorder.status(f"going on after step {state.step}, from {point}")
    await parts.trainer.restore(point, version=state.version)
    parts.checkpoints.rewind(point)
    parts.cursor.restore(state.extra[CURSOR])
    parts.recorder.resume(state.step)
    return state.version


def _parts(
    config: RunConfig, recorder: RunFolderRecorder, side: RolloutWorkers, checkpoints: Checkpoints, trainer: Any
) -> RunContext:
    from app.model.hf_directory import identity

    prompts = side.prepared.prompts
    return RunContext(
        config=config,
        trainer=trainer,
        pool=side.pool,
        sync=side.recovery,
        rollouter=side.rollouter,
        cursor=prompts.train,
        evals=prompts.evals,
        recorder=recorder,
        checkpoints=checkpoints,
        memory=MemoryMonitor(trainer, side.pool),
        model=identity(side.prepared.model_path),
    )


def run(config: RunConfig, folder: Path) -> float:
    """The whole run; returns the last evaluation's accuracy."""
    device = device_of(config.device.kind)
    with run_lock(folder), RunFolderRecorder(config, folder) as recorder:
        return asyncio.run(until_signal(_session(config, device, folder, recorder)))


async def _session(config: RunConfig, device: Device, folder: Path, recorder: RunFolderRecorder) -> float:
    from app.eval.evaluate import evaluate_alone

    async with start_rollout_workers(config, device, folder, recorder) as side:
        if config.mode is not Mode.eval:
            return await live(config, device, folder, recorder, side)
        await gather_or_raise(*side.starts(config.rollout.start_timeout_s))
        async with side.recovery.watching():
            return await evaluate_alone(side.rollouter, side.prepared.prompts.evals, config, recorder)
