"""`mode=train`: a run from its start to its end.

    main             compose the configuration, check the inputs, make the run's folder
    run              open the records, and cancel everything below on SIGINT and SIGTERM
    ├ rollout workers     Ray, engines, reward and environment workers: once (start/session.py)
    └ train_with_restarts
      ├ trainer workers   ranks and their weight sync: again after each loss of the trainer
      ├ restore           the latest checkpoint, the prompt cursor, the records; or begin anew
      ├ controller.run    placement/colocate.py or placement/fully_async.py, until `steps`:
      │                       generate → score → train → sync → commit the step → evaluate, save when due
      ├ save_last_step    if anything ended it early
      └ export            the model, as a Hugging Face directory

Recovery: whatever fails in the trainer ends one pass of `train_with_restarts`. Its open step is aborted; if that works,
the last finished step is saved. Engines abort their requests, new ranks start, and the run continues from the latest
checkpoint, at most `recovery.max_restarts` times without a further step. A resumed run takes the same path in a new
process.
"""

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from app.checkpoint.export import FOLDER as EXPORT
from app.checkpoint.export import export_trained
from app.checkpoint.folder import ResumePoint, named
from app.checkpoint.manager import CheckpointManager
from app.checkpoint.run_state import require_model
from app.cluster.memory_monitor import MemoryMonitor
from app.config import Mode, RunConfig
from app.config.command_line import given_settings, override
from app.config.placement import PlacementKind
from app.device import device_of
from app.errors import TrainerError
from app.mode import ModeResult
from app.model.architecture import architecture_of
from app.model.hf_directory import identity
from app.placement.colocate import Colocate
from app.placement.concurrency import Concurrency
from app.placement.context import RunContext
from app.placement.controller import PlacementController
from app.placement.emergency_checkpoint import save_last_step
from app.placement.fully_async import FullyAsync
from app.placement.time_sharing import TimeSharing
from app.protocols import Trainer
from app.recovery.retrying_sync import RetryingWeightSync
from app.start.idle_settings import idle_settings
from app.start.inputs import RunInputs
from app.start.output_folder import kept_in
from app.start.session import RolloutWorkers, TrainerWorkers, start_rollout_workers, start_trainer_workers
from app.tracking.recorder import RunFolderRecorder
from app.utils.tasks import until_signal
from app.weight_sync.probe import EngineProbe

Schedule = type[PlacementController]
CONTROLLERS: dict[PlacementKind, Schedule] = {
    PlacementKind.colocate: Colocate,
    PlacementKind.fully_async: FullyAsync,
}


def run(config: RunConfig, folder: Path, inputs: RunInputs, schedule: Schedule | None = None) -> ModeResult:
    """Train to the last step; the metric is the last evaluation's accuracy. `schedule`: None is the placement's."""
    with RunFolderRecorder(config, folder) as recorder:
        warn = partial(recorder.warn, second_signal(config))
        finished = False
        try:
            asyncio.run(until_signal(_train(config, folder, inputs, recorder, schedule), on_second=warn))
            finished = True
        finally:
            further = [override("steps", 2 * config.steps)]
            further = [f"{key}=null" for key in config.stop.given] if recorder.stop_reason else further
            recorder.keep(*kept_in(folder, further if finished else ()))
        if reason := recorder.stop_reason:
            recorder.note(f"stopped early: {reason}", {"stop/reason": reason})
    return ModeResult(recorder.accuracy)


def second_signal(config: RunConfig) -> str:
    """Return the message shown at a second SIGINT or SIGTERM."""
    grace = f"checkpoint.grace_s={config.checkpoint.grace_s:g} s after its microbatch"
    saving = f"saving the last step, for at most {grace}, and "
    return f"the run is {saving if config.checkpoint.keep else ''}shutting down; a third signal ends that at once"


async def _train(
    config: RunConfig, folder: Path, inputs: RunInputs, recorder: RunFolderRecorder, schedule: Schedule | None
) -> None:
    from app.mode.plan.memory import with_inflight_groups, with_memory_settings

    device = device_of(config.device.kind)
    model = architecture_of(config.model)
    adapts = config.rollout.max_inflight_groups is None
    config = with_inflight_groups(with_memory_settings(config, device, model), device, model)
    in_flight = config.placement.in_flight_or_default(keeps_cache=model is not None and model.linear is None)
    config = replace(config, placement=replace(config.placement, in_flight=in_flight))
    for sentence in idle_settings(config, given_settings()):
        recorder.warn(sentence)
    async with start_rollout_workers(config, folder, inputs, recorder) as workers:
        await TrainingRun(config, folder, recorder, workers, schedule, adapts).train_with_restarts()


class TrainingRun:
    """One run: the state that survives a restart of the trainer."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        recorder: RunFolderRecorder,
        workers: RolloutWorkers,
        schedule: Schedule | None = None,
        adapts: bool = False,  # the groups in flight, see `Concurrency`
    ):
        self.config = config
        self.folder = folder
        self.recorder = recorder
        self.workers = workers
        self.schedule = schedule or CONTROLLERS[config.placement.kind]
        self.checkpoints = CheckpointManager(
            folder, config.checkpoint.keep, keep_best=config.checkpoint.keep_best, timeout_s=config.trainer.timeout_s
        )
        self._named = named(Path(config.resume).expanduser())  # `resume=` may name a checkpoint, or a run
        self.concurrency = Concurrency(config, recorder.warn, adapts=adapts)
        self.restarts = 0
        self._failures = 0  # of the trainer, since the run reached the step `_furthest`
        self._furthest = 0
        self.started = False  # whether a trainer was ever started: if none can be, there is nothing to restart
        self._cursor_at_start: dict[str, Any] = workers.inputs.prompts.train.state()

    async def train_with_restarts(self) -> None:
        """Train to the last step. Raises the last failure of the trainer."""
        limit = self.config.recovery.max_restarts if self.config.checkpoint.keep else 0
        failure: TrainerError | None = None
        while True:
            try:
                await self._train_once(failure)
                return
            except TrainerError as error:
                if self._failures >= limit or not self.started:
                    raise
                failure = error
                self.restarts += 1
                self._failures += 1
                self.recorder.warn(f"restarting the trainer: {error}")
                await self.workers.supervisor.abort_in_flight()

    async def _train_once(self, failure: TrainerError | None) -> None:
        """Start a trainer and train with it until the run ends or it fails. `failure`: of the trainer before."""
        first = self.restarts == 0
        async with start_trainer_workers(self.folder, self.workers, first=first) as trainer_workers:
            self.started = True
            resume_point = await self.find_resume_point()
            if self.config.checkpoint.keep and first:
                self.checkpoints.prepare(await trainer_workers.trainer.checkpoint_bytes(), resume_point)
            version = await self.restore_or_initialize(trainer_workers.trainer, resume_point)
            if failure is not None:  # after the restore, which truncates records newer than the checkpoint
                self.recorder.warn(
                    f"trainer failed; restarted from step {version} "
                    f"(restart {self._failures}/{self.config.recovery.max_restarts}): {failure}"
                )

            context = self._context(trainer_workers, version)
            self.workers.supervisor.attach(context.weight_sync.sync_restarted)
            due = resume_point is not None and resume_point.state.owes_evaluation(self.config.steps)
            controller = self.schedule(context, version, evaluation_due=due)
            try:
                await self.run(controller)
            except TrainerError:
                if controller.version > self._furthest:
                    self._furthest, self._failures = controller.version, 0
                await trainer_workers.synchronizer.abort()  # engines are in a process group with the old ranks
                raise

    async def run(self, controller: PlacementController) -> None:
        """Run the schedule; save the last step however that ends; export at the end."""
        async with self.workers.monitor():
            try:
                await controller.run()
                await self.checkpoints.wait()
            except asyncio.CancelledError:
                await save_last_step(controller)
                raise
            except Exception:
                saving = asyncio.ensure_future(save_last_step(controller))
                try:
                    await asyncio.shield(saving)
                except asyncio.CancelledError:  # by a first signal, which does not end the save
                    await saving
                    raise
                raise

        if self.config.checkpoint.export:
            self.recorder.status("exporting the model")
            trainer, template = controller.context.trainer, self.workers.inputs.chat_template
            await export_trained(trainer, self.config, self.folder, step=controller.version, chat_template=template)
            exported = {"model": str(self.folder / EXPORT)}
            self.recorder.keep(exported, exported)

    @property
    def _identity(self) -> dict[str, Any]:
        inputs = self.workers.inputs
        return identity(inputs.model_path, self.config.model.lora, inputs.chat_template)

    async def find_resume_point(self) -> ResumePoint | None:
        """Return the verified checkpoint to continue from, or None. Raises `CheckpointError` if none is intact."""
        given = self._named
        if given is not None or self.checkpoints.folder.is_dir():
            self.recorder.status("comparing the checkpoint with its checksums")

        point = await self.checkpoints.resume_point(given)
        if point is not None:
            require_model(point.state, self._identity, point.path)
        return point

    async def restore_or_initialize(self, trainer: Trainer, point: ResumePoint | None) -> int:
        """Restore prompt cursor, trainer and records to the resume point; return its policy version.

        Later checkpoints and records are set aside last, when nothing can refuse the resume point any more.
        """
        cursor = self.workers.inputs.prompts.train
        if point is None:
            if aside := self.checkpoints.start_over():
                self.recorder.warn(f"the run starts over; its checkpoints were set aside: {', '.join(map(str, aside))}")
            if self.restarts or self.recorder.used:
                cursor.restore(self._cursor_at_start)
                self.recorder.resume(0)
            return 0

        state = point.state
        self.recorder.status(f"resuming after step {state.step} from {point.path}")
        self.workers.inputs.restore(state.extra)
        await trainer.restore(point.path, version=state.version)
        aside = self.checkpoints.rewind(point.path)
        self._named = None  # from here on a restart continues from the latest
        self.recorder.resume(state.step)

        # Only now: `resume` removes the warnings of later steps.
        for reason in point.damaged:
            self.recorder.warn(f"resumed from {point.path.name} instead: {reason}")
        if aside:
            later = ", ".join(map(str, aside))
            self.recorder.warn(f"the run went back to step {state.step}; later checkpoints were set aside: {later}")
        return state.version

    def _context(self, trainer_workers: TrainerWorkers, version: int) -> RunContext:
        """Wire the components of a run to each other."""
        config = self.config
        workers = self.workers
        time_sharing = TimeSharing(
            config.offload,
            trainer_workers.trainer,
            workers.pool,
            workers.supervisor,
            adapters=config.serves_adapters,
            in_flight=config.placement.in_flight_or_default(),
        )
        weight_sync = RetryingWeightSync(
            trainer_workers.synchronizer,
            trainer_workers.trainer,
            workers.supervisor,
            version=version,
            params_on_device=time_sharing.params_onloaded if config.placement.colocated else None,
        )
        return RunContext(
            config=config,
            trainer=trainer_workers.trainer,
            pool=workers.pool,
            supervisor=workers.supervisor,
            weight_sync=weight_sync,
            probe=EngineProbe(config.weight_sync.probe, config.device.dtype, self.recorder.warn),
            time_sharing=time_sharing,
            rollouter=workers.rollouter,
            concurrency=self.concurrency,
            cursor=workers.inputs.prompts.train,
            evals=workers.inputs.prompts.evals,
            recorder=self.recorder,
            checkpoints=self.checkpoints,
            memory=MemoryMonitor(trainer_workers.trainer, workers.pool, self.recorder.warn),
            model=self._identity,
            demonstrator=workers.inputs.demonstrator if config.mode is Mode.sft else None,
            demonstrations=workers.inputs.demonstrations if config.data.demonstrations is not None else None,
        )
