"""`mode=train`. Restart loop: restore the latest checkpoint, train, and restart when the trainer is lost.

    start trainer → restore → sync → train … → finished
         ↑ engines abort requests in flight ← trainer lost (at most recovery.max_restarts times)

A resumed run takes the same path in a new process.
"""

import asyncio
from pathlib import Path
from typing import Any

from app.checkpoint.export import export_trained
from app.checkpoint.manager import CheckpointManager, require_model
from app.cluster.memory_monitor import MemoryMonitor
from app.config import RunConfig
from app.config.placement import PlacementKind
from app.device import Device, device_of
from app.errors import RunError, TrainerError, TrainerLost
from app.mode import ModeResult
from app.mode.session import RolloutWorkers, TrainerWorkers, start_rollout_workers, start_trainer_workers
from app.model.hf_directory import identity
from app.placement.colocate import Colocate
from app.placement.context import RunContext
from app.placement.controller import CURSOR, PlacementController
from app.placement.fully_async import FullyAsync
from app.placement.time_sharing import TimeSharing
from app.recovery.resume import checkpoint_of, run_lock
from app.recovery.retrying_sync import RetryingWeightSync
from app.tracking.recorder import RunFolderRecorder
from app.utils.tasks import until_signal

CONTROLLERS: dict[PlacementKind, type[PlacementController]] = {
    PlacementKind.colocate: Colocate,
    PlacementKind.fully_async: FullyAsync,
}


def run(config: RunConfig, folder: Path) -> ModeResult:
    """Train to the last step; the metric is the last evaluation's accuracy."""
    with run_lock(folder), RunFolderRecorder(config, folder) as recorder:
        accuracy = asyncio.run(until_signal(_train(config, folder, recorder)))
    return ModeResult(accuracy)


async def _train(config: RunConfig, folder: Path, recorder: RunFolderRecorder) -> float:
    device = device_of(config.device.kind)
    async with start_rollout_workers(config, device, folder, recorder) as workers:
        return await TrainingRun(config, device, folder, recorder, workers).train_with_restarts()


class TrainingRun:
    """One run: the state that survives a restart of the trainer."""

    def __init__(
        self, config: RunConfig, device: Device, folder: Path, recorder: RunFolderRecorder, workers: RolloutWorkers
    ):
        self.config = config
        self.device = device
        self.folder = folder
        self.recorder = recorder
        self.workers = workers
        self.checkpoints = CheckpointManager(folder, config.checkpoint.keep, timeout_s=config.trainer.timeout_s)
        self.restarts = 0
        self._cursor_at_start: dict[str, Any] = workers.inputs.prompts.train.state()

    async def train_with_restarts(self) -> float:
        """Train to the last step; returns the last evaluation's accuracy. Raises `TrainerLost` after the last retry."""
        limit = self.config.recovery.max_restarts if self.config.checkpoint.every else 0
        lost: TrainerLost | None = None
        while True:
            try:
                return await self._train_once(lost)
            except TrainerLost as error:
                if self.restarts >= limit:
                    raise
                lost = error
                self.restarts += 1
                self.recorder.warn(f"restarting the trainer: {error}")
                await self.workers.supervisor.abort_in_flight()

    async def _train_once(self, lost: TrainerLost | None) -> float:
        """Start a trainer and train with it until the run ends or the trainer is lost."""
        first = self.restarts == 0
        async with start_trainer_workers(
            self.config, self.device, self.folder, self.workers, first=first
        ) as trainer_workers:
            if self.config.checkpoint.every and first:
                self.checkpoints.prepare(await trainer_workers.trainer.checkpoint_bytes())
            version = await self._restore_or_initialize(trainer_workers)
            if lost is not None:  # after the restore, which truncates records newer than the checkpoint
                self.recorder.warn(
                    f"trainer failed; restarted from step {version} "
                    f"(restart {self.restarts}/{self.config.recovery.max_restarts}): {lost}"
                )

            context = self._context(trainer_workers, version)
            self.workers.supervisor.attach(context.weight_sync)
            controller = CONTROLLERS[self.config.placement.kind](context, version)
            try:
                return await self._run(controller)
            except TrainerError as error:
                await trainer_workers.synchronizer.abort()
                if isinstance(error, TrainerLost) or trainer_workers.trainer.broken:
                    raise TrainerLost(str(error)) from error
                raise

    async def _run(self, controller: PlacementController) -> float:
        """Run the schedule; save a checkpoint on interrupt, export at the end."""
        async with self.workers.supervisor.monitor():
            try:
                accuracy = await controller.run()
            except asyncio.CancelledError:
                await save_on_interrupt(controller)
                raise
            except RunError:
                await self.checkpoints.settle(self.config.checkpoint.grace_s)
                raise
            await self.checkpoints.wait()

        if self.config.checkpoint.export:
            self.recorder.status("exporting the model")
            await export_trained(controller.context.trainer, self.config, self.folder)
        return accuracy

    async def _restore_or_initialize(self, trainer_workers: TrainerWorkers) -> int:
        """Restore trainer, prompt cursor and metrics to the resume point; return its policy version."""
        first = self.restarts == 0
        cursor = self.workers.inputs.prompts.train
        named = checkpoint_of(self.config.resume) if first else None
        checkpoint = named or self.checkpoints.latest()

        if checkpoint is None:
            if not first or self.recorder.used:
                cursor.restore(self._cursor_at_start)
                self.recorder.resume(0)
            return 0

        state = self.checkpoints.read_state(checkpoint)
        require_model(state, identity(self.workers.inputs.model_path), checkpoint)
        self.recorder.status(f"resuming after step {state.step} from {checkpoint}")
        await trainer_workers.trainer.restore(checkpoint, version=state.version)
        self.checkpoints.rewind(checkpoint)
        cursor.restore(state.extra[CURSOR])
        self.recorder.resume(state.step)
        return state.version

    def _context(self, trainer_workers: TrainerWorkers, version: int) -> RunContext:
        """Wire the components of a run to each other."""
        config = self.config
        workers = self.workers
        time_sharing = TimeSharing(config.offload, trainer_workers.trainer, workers.pool, workers.supervisor)
        colocate = config.placement.kind is PlacementKind.colocate
        weight_sync = RetryingWeightSync(
            trainer_workers.synchronizer,
            trainer_workers.trainer,
            workers.supervisor,
            version=version,
            params_on_device=time_sharing.params_onloaded if colocate else None,
        )
        return RunContext(
            config=config,
            trainer=trainer_workers.trainer,
            pool=workers.pool,
            supervisor=workers.supervisor,
            weight_sync=weight_sync,
            time_sharing=time_sharing,
            rollouter=workers.rollouter,
            cursor=workers.inputs.prompts.train,
            evals=workers.inputs.prompts.evals,
            recorder=self.recorder,
            checkpoints=self.checkpoints,
            memory=MemoryMonitor(trainer_workers.trainer, workers.pool),
            model=identity(workers.inputs.model_path),
        )


async def save_on_interrupt(controller: PlacementController) -> None:
    """Save the last committed step, unless it is saved already, within `checkpoint.grace_s`."""
    if not controller.config.checkpoint.every:
        return
    try:
        async with asyncio.timeout(controller.config.checkpoint.grace_s):
            await _save_last_step(controller)
    except (TimeoutError, RunError) as error:
        reason = str(error) or "checkpoint.grace_s passed"
        controller.context.recorder.warn(f"step {controller.version} was not saved: {reason}")


async def _save_last_step(controller: PlacementController) -> None:
    trainer = controller.context.trainer
    checkpoints = controller.context.checkpoints
    await trainer.abort_step()
    await checkpoints.wait()

    latest = checkpoints.latest()
    if latest is not None and checkpoints.read_state(latest).step == controller.version:
        return

    version = await trainer.version()
    if version is None or version > controller.version:
        raise TrainerError("the next update had already changed the parameters")
    await controller.save()
    await checkpoints.wait()
