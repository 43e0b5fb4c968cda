"""Builds the parts of a run, introduces them to each other, and ends them all, however the run ends."""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.config import Mode, RunConfig
from app.device import Device, device_of
from app.device.schema import DeviceKind
from app.errors import Interrupted, RunError
from app.placement.fully_async import first_failure
from app.placement.parts import Parts
from app.placement.prepare import Prepared, prepare
from app.placement.sampler import Sampler
from app.placement.schema import PlacementKind
from app.rollout.pool import EnginePool
from app.tracking.recorder import RunRecorder

log = logging.getLogger(__name__)
ENGINE_KEY = "POSTTRAIN_SERVER_KEY"  # environment: the key of servers named by rollout.urls
STOP_SECONDS = 10.0


def run(config: RunConfig, folder: Path) -> float:
    """The whole run; returns the last evaluation's accuracy."""
    device = device_of(config.device.kind)
    with RunRecorder(config, folder) as recorder:
        return asyncio.run(_until_signal(_run(config, device, folder, recorder)))


async def _until_signal(work: Any) -> float:
    """The work's result; SIGINT and SIGTERM end it with `Interrupted`, after everything was ended."""
    task = asyncio.ensure_future(work)
    asked: list[str] = []

    def stop(number: signal.Signals) -> None:
        asked.append(number.name)
        task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        raise Interrupted(f"interrupted by {asked[0]}" if asked else "interrupted") from None
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def _run(config: RunConfig, device: Device, folder: Path, recorder: RunRecorder) -> float:
    from app.placement.colocate import Colocate
    from app.placement.evaluate import evaluate_alone
    from app.placement.fully_async import FullyAsync
    from app.placement.train import Conductor

    stories: dict[PlacementKind, type[Conductor]] = {
        PlacementKind.colocate: Colocate,
        PlacementKind.fully_async: FullyAsync,
    }
    if config.mode is Mode.eval:
        async with rollout_side(config, device, folder, recorder) as side:
            return await evaluate_alone(side.sampler, side.prepared.prompts.evals, config, recorder)
    async with build(config, device, folder, recorder) as parts:
        return await stories[config.placement.kind](parts).run()


@dataclass(frozen=True, slots=True)
class RolloutSide:
    """What generates and scores: enough for an evaluation."""

    prepared: Prepared
    reservation: Any
    engines: list[Any]
    pool: EnginePool
    sampler: Sampler


@asynccontextmanager
async def build(config: RunConfig, device: Device, folder: Path, recorder: RunRecorder) -> AsyncIterator[Parts]:
    """All parts, started; all of them ended when the block is left."""
    from app.offload.trainer import Offload
    from app.weight_sync.make import make_sync

    async with contextlib.AsyncExitStack() as stack:
        side = await stack.enter_async_context(rollout_side(config, device, folder, recorder, wait=False))
        trainer = _trainer(config, device, side.prepared.model_path, folder, side.reservation)
        stack.callback(_kill_ranks, trainer)
        await _together(trainer.setup(), *_starts(config, side.engines))
        await trainer.attach("offload", Offload)
        sync = make_sync(config, device, trainer, side.engines, folder)
        await sync.prepare()
        yield Parts(
            config=config,
            trainer=trainer,
            pool=side.pool,
            sync=sync,
            sampler=side.sampler,
            cursor=side.prepared.prompts.train,
            evals=side.prepared.prompts.evals,
            recorder=recorder,
        )


@asynccontextmanager
async def rollout_side(
    config: RunConfig, device: Device, folder: Path, recorder: RunRecorder, *, wait: bool = True
) -> AsyncIterator[RolloutSide]:
    """Ray, engines and reward workers. Without `wait` the engines are left to be started with the trainer."""
    from app.placement import cluster
    from app.reward.scorer import Scorer

    async with contextlib.AsyncExitStack() as stack:
        prepared = prepare(config, recorder.doing)
        scorer = Scorer(
            config.reward,
            step_trajectories=config.algorithm.trajectories_per_step,
            log=folder / "logs" / "reward.log",
        )
        stack.callback(scorer.close)
        recorder.doing("starting Ray")
        stack.callback(_shutdown_ray)
        cluster.connect(config, device)
        reservation = cluster.reserve(config, device)
        trained = "" if wait else f" and {config.placement.trainer_ranks} trainer rank(s)"
        recorder.doing(f"starting {config.engines} engine(s){trained}")
        engines = _engines(config, device, prepared.model_path, folder, reservation)
        stack.push_async_callback(_stop_engines, engines)
        if wait:
            await _together(*_starts(config, engines))
        pool = EnginePool(engines)
        sampler = Sampler(pool, scorer, prepared.tokenizer, recorder.timeline)
        yield RolloutSide(prepared, reservation, engines, pool, sampler)


def _starts(config: RunConfig, engines: list[Any]) -> list[Any]:
    return [engine.start(config.rollout.start_timeout_s) for engine in engines]


def _engines(config: RunConfig, device: Device, path: Path, folder: Path, reservation: Any) -> list[Any]:
    """The hosts of all engines, created and not started."""
    import ray

    from app.rollout.host import EngineHost, HostSpec, free_port
    from app.rollout.remote import RemoteEngine
    from app.rollout.server import ServerSpec

    rollout, engines = config.rollout, []
    for index in range(config.engines):
        name = f"engine {index}"
        server = None
        if not rollout.urls:
            server = ServerSpec(
                name=name,
                model_path=str(path),
                host="127.0.0.1",
                port=free_port() if rollout.port is None else rollout.port + index,
                key=secrets.token_urlsafe(24),
                flags=engine_flags(config, device),
                environment={**device.engine_env, **_engine_threads(config, device)},
                log=folder / "logs" / f"engine_{index}.log",
            )
        spec = HostSpec(
            name=name,
            seed=config.seed,
            start_timeout_s=rollout.start_timeout_s,
            stall_timeout_s=rollout.stall_timeout_s,
            releases_memory=device.shares_memory and config.offload.engine,
            log=folder / "logs" / f"engine_host_{index}.log",
            server=server,
            url=rollout.urls[index] if rollout.urls else None,
            key=os.environ.get(ENGINE_KEY) if rollout.urls else None,
        )
        options = {"num_cpus": 0} if rollout.urls else reservation.engine_options(index)
        actor = ray.remote(EngineHost).options(max_concurrency=4096, **options).remote(spec)
        engines.append(RemoteEngine(name, actor))
    return engines


def engine_flags(config: RunConfig, device: Device) -> dict[str, object]:
    """SGLang's flags: ours, then the device's, then the configuration's, which win."""
    colocate = config.placement.kind is PlacementKind.colocate
    return {
        "dtype": config.device.dtype.name,
        "tp-size": config.rollout.tensor_parallel,
        "random-seed": config.seed,
        "skip-tokenizer-init": True,
        "mem-fraction-static": config.rollout.memory_fraction,
        "trust-remote-code": config.model.trust_remote_code,
        "log-level-http": "warning",
        "enable-memory-saver": colocate and device.shares_memory and config.offload.engine,
        **device.engine_args,
        **config.device.engine_args,
        **config.rollout.engine_args,
    }


def _engine_threads(config: RunConfig, device: Device) -> dict[str, str]:
    """On CPU the cores are shared: by the engines alone in colocate, with the trainer's ranks in fully_async."""
    if device.kind is not DeviceKind.cpu:
        return {}
    width = config.rollout.tensor_parallel
    threads = {"OMP_NUM_THREADS": str(_threads(config, config.engines * width))}
    return threads | ({"SGLANG_CPU_OMP_THREADS_BIND": cores_of_ranks(os.cpu_count() or 1, width)} if width > 1 else {})


def cores_of_ranks(cores: int, width: int) -> str:
    """The cores of each rank of an engine, as SGLang wants to be told where there are more ranks than NUMA nodes.

    >>> cores_of_ranks(8, 2), cores_of_ranks(2, 3)
    ('0-3|4-7', '0|1|0')
    """
    share = max(1, cores // width)
    firsts = [rank * share % cores for rank in range(width)]
    return "|".join(f"{first}-{first + share - 1}" if share > 1 else f"{first}" for first in firsts)


def _threads(config: RunConfig, processes: int) -> int:
    cores = os.cpu_count() or 1
    if config.placement.kind is PlacementKind.fully_async:
        processes = config.placement.trainer_ranks + config.placement.engine_devices
    return max(1, cores // processes)


def _trainer(config: RunConfig, device: Device, path: Path, folder: Path, reservation: Any) -> Any:
    """The trainer's ranks, created and not set up."""
    import ray

    from app.trainer.fsdp import FsdpTrainer
    from app.trainer.rank import RankSpec, TrainerRank
    from app.trainer.step import StepSettings

    ranks = config.placement.trainer_ranks
    spec = RankSpec(
        device=config.device.kind,
        dtype=config.device.dtype,
        model_path=path,
        trust_remote_code=config.model.trust_remote_code,
        trainer=config.trainer,
        step=StepSettings(
            algorithm=config.algorithm,
            correction=config.correction,
            temperature=config.rollout.temperature,
            max_completion_tokens=config.rollout.max_completion_tokens,
            tokens_per_microbatch=config.trainer.tokens_per_microbatch,
        ),
        reference=config.algorithm.needs_reference,
        ranks=ranks,
        threads=_threads(config, ranks),
        seed=config.seed,
        logs=folder / "logs",
        profile_steps=tuple(config.profile.steps),
    )
    make = ray.remote(concurrency_groups={"answers": 1})(TrainerRank)  # type: ignore[call-overload]
    environment = {"env_vars": dict(device.trainer_env)} if device.trainer_env else None
    actors = [
        make.options(runtime_env=environment, **reservation.rank_options(rank)).remote(spec, rank)
        for rank in range(ranks)
    ]
    return FsdpTrainer(actors, timeout_s=config.trainer.timeout_s, logs=folder / "logs")


async def _together(*work: Any) -> None:
    """All of it; the first failure is raised and the rest is cancelled."""
    try:
        async with asyncio.TaskGroup() as group:
            for each in work:
                group.create_task(each)
    except BaseExceptionGroup as failures:
        raise first_failure(failures) from None


async def _stop_engines(engines: list[Any]) -> None:
    """Politely first; what does not answer dies with its host."""
    stopping = [asyncio.wait_for(engine.stop(), STOP_SECONDS) for engine in engines]
    for engine, outcome in zip(engines, await asyncio.gather(*stopping, return_exceptions=True), strict=True):
        if isinstance(outcome, (RunError, TimeoutError)):
            log.warning("%s did not stop by itself: %s", engine.name, outcome)


def _kill_ranks(trainer: Any) -> None:
    import ray

    for rank in trainer.ranks:
        ray.kill(rank)


def _shutdown_ray() -> None:
    import ray

    ray.shutdown()
