"""Starts the workers of a run, and shuts them down however the run ends.

Two nested contexts: rollout workers (Ray, engines, reward workers) last for the whole run; trainer workers (ranks,
weight sync) are restarted when the trainer is lost.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import ray

from app.checkpoint.run_state import read_state
from app.cluster.connect import connect
from app.cluster.engine_factory import EngineFactory, threads_of
from app.cluster.placement_group import DevicePlacement, reserve
from app.config import Mode, RunConfig
from app.config.offload import OptimizerOffload
from app.config.weight_sync import TransportKind, transport_of
from app.device import Device, device_of
from app.device.process_environment import EXPANDABLE, expandable_segments_off
from app.environment.pool import EnvironmentPool
from app.offload import make_offload
from app.placement.time_sharing import TimeSharing
from app.protocols import RolloutEngine
from app.recovery.engine_supervisor import EngineSupervisor
from app.reward.scorer import Scorer
from app.rollout.engine.pool import EnginePool
from app.rollout.episodes import EpisodeLimits, Episodes, episode_failures
from app.rollout.rollouter import Rollouter
from app.start.environments import worker_spec
from app.start.inputs import RunInputs
from app.tracking.number_format import plural
from app.tracking.run_folder.timeline import Timeline
from app.trainer.rank import CONCURRENCY_GROUPS, OFFLOAD, RankSpec, TrainerRank
from app.trainer.remote import RemoteTrainer
from app.types import EngineStart, TrainerMemory
from app.utils.ray_calls import keep_ray_logs
from app.utils.tasks import gather_or_raise
from app.weight_sync.synchronizer import make_synchronizer

if TYPE_CHECKING:
    from app.weight_sync.synchronizer import Synchronizer

PHASE_POLL_INTERVAL_S = 1.0


class StatusRecorder(Protocol):
    """What the start of a run uses of its recorder, see `RunFolderRecorder`."""

    @property
    def timeline(self) -> Timeline: ...

    def status(self, text: str) -> None: ...

    def note(self, text: str, facts: Mapping[str, str | int] | None = None) -> None: ...

    def warn(self, text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class RolloutWorkers:
    """Everything that generates and scores."""

    config: RunConfig
    inputs: RunInputs
    device_placement: Any
    pool: EnginePool
    supervisor: EngineSupervisor
    rollouter: Rollouter
    recorder: StatusRecorder
    teacher: EngineSupervisor | None = None  # of the engine of `teacher.path`

    @property
    def engines(self) -> list[RolloutEngine]:
        """All engines, the teacher's included."""
        return [*self.pool.engines, *(self.teacher.pool.engines if self.teacher is not None else [])]

    @asynccontextmanager
    async def monitor(self) -> AsyncIterator[None]:
        """Restart lost engines while the block runs, as `EngineSupervisor.monitor` does."""
        async with self.supervisor.monitor(), self.teacher.monitor() if self.teacher else nullcontext():
            yield

    async def start_engines(self) -> None:
        """Start all engines concurrently. Shows what the slowest of them does."""
        engines = self.engines
        if not engines:
            return
        showing = asyncio.create_task(self._show_phases())
        try:
            await gather_or_raise(*(engine.start(self.config.rollout.start_timeout_s) for engine in engines))
        finally:
            showing.cancel()
            await asyncio.gather(showing, return_exceptions=True)
        self.recorder.status(f"{plural(len(engines), 'engine')} ready")

    async def _show_phases(self) -> None:
        """Show each phase of `EngineStart` once all engines have reached it, until cancelled or an engine is lost."""
        order = list(EngineStart)
        reached = -1
        while True:
            phases = await asyncio.gather(*(engine.start_phase() for engine in self.engines))
            slowest = min(order.index(phase) for phase in phases)
            if slowest > reached:
                reached = slowest
                self.recorder.status(f"{plural(len(phases), 'engine')}: {order[slowest].value}")
            await asyncio.sleep(PHASE_POLL_INTERVAL_S)


@dataclass(frozen=True, slots=True)
class TrainerWorkers:
    """The trainer and the synchronizer of its weights."""

    trainer: RemoteTrainer
    synchronizer: "Synchronizer"


@asynccontextmanager
async def start_rollout_workers(
    config: RunConfig, folder: Path, inputs: RunInputs, recorder: StatusRecorder, *, weights: Path | None = None
) -> AsyncIterator[RolloutWorkers]:
    """Start Ray and the reward workers and create the engines, which are started together with the trainer.

    `weights`: the model directory that the engines load; None is that of `model=`.
    """
    device = device_of(config.device.kind)
    async with AsyncExitStack() as stack:
        fork = None
        starts_engines = config.teacher_devices or (config.engines and not config.rollout.urls)
        if device.fork_server is not None and starts_engines:
            fork = stack.enter_context(device.fork_server(device.engine_env, folder / "logs" / "fork_server.log"))

        recorder.note(inputs.prompts.counts.text, inputs.prompts.counts.facts)
        for warning in inputs.warnings:
            recorder.warn(warning)

        episodes = None
        if config.environment.multi_turn:
            recorder.status("starting the environment")
            episodes = await _start_environments(config, inputs, folder, recorder, stack)

        scorer = Scorer(
            config.reward,
            step_trajectories=config.algorithm.trajectories_per_step,
            log=folder / "logs" / "reward.log",
            warn=recorder.warn,
        )
        stack.callback(scorer.close)
        if config.engines:
            await scorer.start()

        recorder.status("starting Ray")
        stack.push(partial(keep_ray_logs, folder / "logs"))
        stack.callback(ray.shutdown)
        await connect(config, device)
        device_placement = await reserve(config, device)

        teacher = " and the teacher" if config.teacher_devices else ""
        trainer = "" if config.mode is Mode.eval else f" and {plural(config.placement.trainer_ranks, 'trainer rank')}"
        recorder.status(f"starting {plural(config.engines, 'engine')}{teacher}{trainer}")
        path = weights or inputs.model_path
        resumed_at = read_state(inputs.checkpoint).step if inputs.checkpoint is not None else 0
        make = EngineFactory(config, device, path, folder, device_placement, fork, inputs.teacher_path, resumed_at)
        pool = EnginePool([make(index) for index in range(config.engines)])
        stack.push_async_callback(_end_engines, pool)
        supervisor = EngineSupervisor(config, pool, make, recorder.warn)

        teachers = None
        if config.teacher_devices:
            teachers = EngineSupervisor(config, EnginePool([make.teacher()]), make.teacher, recorder.warn)
            stack.push_async_callback(_end_engines, teachers.pool)
        scored_by = None
        if (config.teacher.servers or config.teacher_devices) and config.mode is not Mode.eval:
            from app.teacher import Teacher

            teacher_client = Teacher(config.teacher, teachers.pool if teachers is not None else None)
            scored_by = (await stack.enter_async_context(teacher_client)).score

        rollouter = Rollouter(pool, scorer, inputs.tokenizer, recorder.timeline, config.recovery, episodes, scored_by)
        yield RolloutWorkers(config, inputs, device_placement, pool, supervisor, rollouter, recorder, teachers)


async def _start_environments(
    config: RunConfig, inputs: RunInputs, folder: Path, recorder: StatusRecorder, stack: AsyncExitStack
) -> Episodes:
    """Start the workers of the environment, which end with `stack`."""
    settings = config.environment
    pool = EnvironmentPool(
        worker_spec(config, inputs.model_path),
        workers=settings.workers,
        episodes=settings.episodes,
        log=folder / "logs" / "environment.log",
        warn=recorder.warn,
    )
    stack.callback(pool.close)
    await pool.start()

    limits = EpisodeLimits(config.rollout.max_prompt_tokens, config.rollout.max_completion_tokens, settings.retries)
    failures = episode_failures(settings.max_failed_fraction, config.algorithm.trajectories_per_step, recorder.warn)
    return Episodes(pool, limits, failures, config.seed)


@asynccontextmanager
async def start_trainer_workers(folder: Path, workers: RolloutWorkers, *, first: bool) -> AsyncIterator[TrainerWorkers]:
    """Start the trainer ranks and their weight sync; the first time, also the engines."""
    config = workers.config
    device = device_of(config.device.kind)
    async with AsyncExitStack() as stack:
        if not first:
            await workers.device_placement.locate_ranks()
        trainer = make_trainer(config, device, workers.inputs.model_path, folder, workers.device_placement)
        stack.callback(lambda: [ray.kill(rank) for rank in trainer.ranks])

        if config.placement.colocated and device.shares_memory:
            await _start_on_shared_devices(config, device, trainer, workers, first=first)
        else:
            starts = [workers.start_engines()] if first else []
            await gather_or_raise(_set_up(device, trainer, workers), *starts)

        engines = workers.pool.engines
        alone = sum(node["Alive"] for node in ray.nodes()) == 1  # machine of the cluster
        synchronizer = make_synchronizer(config, device, trainer, engines, folder, one_machine=alone)
        stack.push_async_callback(synchronizer.close)
        await synchronizer.prepare()
        yield TrainerWorkers(trainer, synchronizer)


async def _start_on_shared_devices(
    config: RunConfig, device: Device, trainer: RemoteTrainer, workers: RolloutWorkers, *, first: bool
) -> None:
    """Start the trainer, then the engines: an engine sizes its KV cache by the free device memory."""
    devices = TimeSharing(config.offload, trainer, workers.pool, workers.supervisor, adapters=config.serves_adapters)
    if not first:
        await devices.offload_engines()
    await _set_up(device, trainer, workers)

    if first:
        await devices.offload_trainer(TrainerMemory)
        await workers.start_engines()
        await devices.offload_engines()
        await devices.onload_trainer(TrainerMemory)


async def _set_up(device: Device, trainer: RemoteTrainer, workers: RolloutWorkers) -> None:
    attention = await trainer.setup()
    if attention is not None:
        workers.recorder.note(f"attention kernels: {attention}", {"attention_kernels": attention})
    await trainer.attach(OFFLOAD, partial(make_offload, moves=device.shares_memory))
    workers.recorder.status("trainer ready")


async def _end_engines(pool: EnginePool) -> None:
    await asyncio.gather(*(engine.end() for engine in pool.engines))


def allocator_environment(config: RunConfig, device: Device) -> dict[str, str]:
    """Return the allocator's options of a rank: no expandable segments where engines map its buffers.

    Such memory is passed on as a file descriptor, which most containers forbid between unrelated processes. Elsewhere
    some devices use expandable segments, unless the user's environment has options of its own.
    """
    transport = transport_of(config.weight_sync, shared_devices=config.shared_devices, device=device.kind)
    if transport is TransportKind.ipc:
        return {name: expandable_segments_off(os.environ.get(name, "")) for name in device.allocator_variables}
    if device.expandable_segments and not any(name in os.environ for name in device.allocator_variables):
        return {device.allocator_variables[0]: f"{EXPANDABLE}:True"}
    return {}


def make_trainer(
    config: RunConfig, device: Device, model_path: Path, run_folder: Path, placement: DevicePlacement
) -> RemoteTrainer:
    """Create the trainer's ranks, without setting them up."""
    ranks = config.placement.trainer_ranks
    # of defaults, the user's own value wins
    defaults = {name: os.environ.get(name, value) for name, value in device.trainer_defaults.items()}
    spec = RankSpec(
        device=config.device.kind,
        dtype=config.device.dtype,
        model_path=model_path,
        trust_remote_code=config.model.trust_remote_code,
        trainer=config.trainer,
        run_updates=config.optimizer_updates,
        algorithm=config.algorithm,
        correction=config.correction,
        temperature=config.rollout.temperature,
        max_completion_tokens=config.rollout.max_completion_tokens,
        reference=config.algorithm.needs_reference,
        ranks=ranks,
        threads=threads_of(config, ranks),
        seed=config.seed,
        logs=run_folder / "logs",
        profile_steps=tuple(config.trainer.profile_steps),
        supervised=config.mode is Mode.sft,
        moments_on_host=config.offload.optimizer is OptimizerOffload.update and device.shares_memory,
        lora=config.model.lora,
        teacher=config.teacher,
        environment={**defaults, **device.trainer_env, **allocator_environment(config, device)},
    )

    make = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(TrainerRank)  # type: ignore[call-overload]  # missing in Ray's stubs
    actors = [make.options(**placement.rank_options(rank)).remote(spec, rank) for rank in range(ranks)]
    return RemoteTrainer(actors, timeout_s=config.trainer.timeout_s, logs=run_folder / "logs")
