"""Creates the Ray actors of a run on their reserved devices: engine hosts and trainer ranks. Starts none of them."""

import os
import secrets
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import ray

from app.cluster.placement_group import DevicePlacement
from app.config import RunConfig
from app.config.device import DeviceKind
from app.config.placement import PlacementKind
from app.config.weight_sync import TransportKind, transport_of
from app.device import Device, Fork
from app.device.process_environment import expandable_segments_off
from app.rollout.host import EngineHost, HostSpec
from app.rollout.remote import RemoteEngine
from app.rollout.server import ServerSpec
from app.rollout.server_args import engine_flags
from app.trainer.rank import CONCURRENCY_GROUPS, RankSpec, TrainerRank
from app.trainer.remote import RemoteTrainer

ENGINE_KEY = "POSTTRAIN_SERVER_KEY"  # environment variable: the key of the servers of `rollout.urls`


@dataclass
class EngineFactory:
    """Creates the hosts of a run's engines, without starting them. Replacements of lost engines are made here too."""

    config: RunConfig
    device: Device
    model_path: Path  # what the engines load
    run_folder: Path
    placement: DevicePlacement
    fork: Fork | None  # of `Device.fork_server`
    _restarts: Counter[int] = field(default_factory=Counter)  # engines made so far, by index

    def __call__(self, index: int) -> RemoteEngine:
        """Create the host of engine `index`. Its sampling noise is not that of an earlier one."""
        restarts = self._restarts[index]
        self._restarts[index] += 1

        rollout = self.config.rollout
        name = f"engine {index}"
        logs = self.run_folder / "logs"

        server = url = key = None
        options = {"num_cpus": 0}
        if rollout.urls:
            url = rollout.urls[index]
            key = os.environ.get(ENGINE_KEY)
        else:
            options = self.placement.engine_options(index)
            server = ServerSpec(
                name=name,
                model_path=str(self.model_path),
                host="127.0.0.1",
                port=0 if rollout.port is None else rollout.port + index,
                key=secrets.token_urlsafe(24),
                flags=engine_flags(self.config, self.device, index=index, restarts=restarts),
                environment={
                    **self.device.engine_env,
                    **engine_threads(self.config, self.device),
                    **self.placement.engine_environment(index),
                },
                log=logs / f"engine_{index}.log",
                fork=self.fork,
            )

        spec = HostSpec(
            name=name,
            start_timeout_s=rollout.start_timeout_s,
            stall_timeout_s=rollout.stall_timeout_s,
            releases_memory=self.device.shares_memory and self.config.offload.engine,
            log=logs / f"engine_host_{index}.log",
            serves_adapters=self.config.serves_adapters,
            server=server,
            devices=(self.device.resource, self.device.visibility) if self.device.visibility is not None else None,
            url=url,
            key=key,
        )
        actor = ray.remote(EngineHost).options(max_concurrency=4096, **options).remote(spec)
        return RemoteEngine(name, actor)


def engine_threads(config: RunConfig, device: Device) -> dict[str, str]:
    """Return the environment that divides the cores among engines on CPU; in fully_async ranks get their share too."""
    if device.kind is not DeviceKind.cpu:
        return {}

    width = config.rollout.tensor_parallel
    processes = config.engines * width
    threads = {"OMP_NUM_THREADS": str(_threads(config, processes))}
    if width > 1:
        threads["SGLANG_CPU_OMP_THREADS_BIND"] = cores_of_ranks(os.cpu_count() or 1, width)
    return threads


def cores_of_ranks(cores: int, width: int) -> str:
    """Return the cores of each rank of an engine. SGLang requires it with more ranks than NUMA nodes.

    >>> cores_of_ranks(8, 2), cores_of_ranks(2, 3)
    ('0-3|4-7', '0|1|0')
    """
    share = max(1, cores // width)
    firsts = [rank * share % cores for rank in range(width)]
    return "|".join(f"{first}-{first + share - 1}" if share > 1 else f"{first}" for first in firsts)


def _threads(config: RunConfig, processes: int) -> int:
    """Return the threads of each of `processes` processes. In fully_async engines and ranks compute simultaneously."""
    cores = os.cpu_count() or 1
    if config.placement.kind is PlacementKind.fully_async:
        processes = config.placement.trainer_ranks + config.placement.engine_devices
    return max(1, cores // processes)


def allocator_environment(config: RunConfig, device: Device) -> dict[str, str]:
    """Return the environment that keeps a rank's buffers out of expandable segments, where engines map them.

    Such memory is passed on as a file descriptor, which most containers forbid between unrelated processes.
    """
    transport = transport_of(config.weight_sync, shared_devices=config.shared_devices, device=device.kind)
    if transport is not TransportKind.ipc:
        return {}
    return {variable: expandable_segments_off(os.environ.get(variable, "")) for variable in device.allocator_variables}


def make_trainer(
    config: RunConfig, device: Device, model_path: Path, run_folder: Path, placement: DevicePlacement
) -> RemoteTrainer:
    """Create the trainer's ranks, without setting them up."""
    ranks = config.placement.trainer_ranks
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
        threads=_threads(config, ranks),
        seed=config.seed,
        logs=run_folder / "logs",
        profile_steps=tuple(config.trainer.profile_steps),
        lora=config.model.lora,
        teacher=config.teacher,
    )

    make = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(TrainerRank)  # type: ignore[call-overload]  # missing in Ray's stubs
    variables = {**device.trainer_env, **allocator_environment(config, device)}
    environment = {"env_vars": variables} if variables else None
    actors = [
        make.options(runtime_env=environment, **placement.rank_options(rank)).remote(spec, rank)
        for rank in range(ranks)
    ]
    return RemoteTrainer(actors, timeout_s=config.trainer.timeout_s, logs=run_folder / "logs")
