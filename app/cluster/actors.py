"""Creates the actors of a run where the reservation puts them: engine hosts and trainer ranks. Starts nothing."""

import os
import secrets
from pathlib import Path

import ray

from app.cluster.placement_group import DevicePlacement
from app.config import RunConfig
from app.config.device import DeviceKind
from app.config.placement import PlacementKind
from app.device import Device
from app.rollout.host import EngineHost, HostSpec
from app.rollout.remote import RemoteEngine
from app.rollout.server import ServerSpec
from app.rollout.server_args import engine_flags
from app.trainer.remote import RemoteTrainer

ENGINE_KEY = "POSTTRAIN_SERVER_KEY"  # environment: the key of servers named by rollout.urls


def make_engine(
    config: RunConfig, device: Device, path: Path, folder: Path, reservation: DevicePlacement, index: int
) -> RemoteEngine:
    """The host of an engine, created and not started; also of one that takes the place of another."""
    rollout, name = config.rollout, f"engine {index}"
    server = None
    if not rollout.urls:
        server = ServerSpec(
            name=name,
            model_path=str(path),
            host="127.0.0.1",
            port=0 if rollout.port is None else rollout.port + index,
            key=secrets.token_urlsafe(24),
            flags=engine_flags(config, device),
            environment={
                **device.engine_env,
                **_engine_threads(config, device),
                **reservation.engine_environment(index),
            },
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
    return RemoteEngine(name, actor)


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


def make_trainer(
    config: RunConfig, device: Device, path: Path, folder: Path, reservation: DevicePlacement
) -> RemoteTrainer:
    """The trainer's ranks, created and not set up."""
    from app.trainer.rank import CONCURRENCY_GROUPS, RankSpec, TrainerRank
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
        profile_steps=tuple(config.trainer.profile_steps),
    )
    make = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(TrainerRank)  # type: ignore[call-overload]
    environment = {"env_vars": dict(device.trainer_env)} if device.trainer_env else None
    actors = [
        make.options(runtime_env=environment, **reservation.rank_options(rank)).remote(spec, rank)
        for rank in range(ranks)
    ]
    return RemoteTrainer(actors, timeout_s=config.trainer.timeout_s, logs=folder / "logs")
