"""Creates the Ray actors that host engines, on their reserved devices: ports, keys, flags. Starts none of them."""

import os
import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray

from app.cluster.placement_group import DevicePlacement
from app.config import RunConfig
from app.config.device import DeviceKind
from app.device import Device, Fork
from app.rollout.engine.host import EngineHost
from app.rollout.engine.remote import RemoteEngine
from app.rollout.engine.server import ServerSpec
from app.rollout.engine.server_args import engine_flags, teacher_flags
from app.rollout.engine.server_connection import HostSpec

ENGINE_KEY = "POSTTRAIN_SERVER_KEY"  # environment variable: the key of the servers of `rollout.urls`


@dataclass
class EngineFactory:
    """Creates the hosts of a run's engines and teacher, without starting them. Replacements are made here too."""

    config: RunConfig
    device: Device
    model_path: Path  # what the engines load
    run_folder: Path
    placement: DevicePlacement
    fork: Fork | None  # of `Device.fork_server`
    teacher_path: Path | None = None  # what the engine of `teacher.path` loads
    resumed_at: int = 0  # the step after which this process continues the run
    _restarts: Counter[int] = field(default_factory=Counter)  # engines made so far, by index

    def __call__(self, index: int) -> RemoteEngine:
        """Create the host of engine `index`. Its random stream differs from those of earlier engines at this index."""
        restarts = self._restarts[index]
        self._restarts[index] += 1

        rollout = self.config.rollout
        spec = replace(
            self._spec(f"engine {index}", f"engine_host_{index}.log"),
            releases_memory=self.config.shared_devices and self.device.shares_memory and self.config.offload.engine,
            serves_adapters=self.config.serves_adapters,
        )
        if rollout.urls:
            key, width = os.environ.get(ENGINE_KEY), rollout.tensor_parallel
            return _host(replace(spec, url=rollout.urls[index], key=key, tensor_parallel=width), {"num_cpus": 0})

        server = self._server(spec.name, self.model_path, self.config.rollout.tensor_parallel)
        server = replace(
            server,
            port=0 if rollout.port is None else rollout.port + index,
            flags=engine_flags(self.config, self.device, index=index, restarts=restarts, resumed_at=self.resumed_at),
            environment={
                **server.environment,
                **self.placement.engine_environment(index),
                # SGLang gives a draft the policy's context, and refuses one that was trained on shorter texts.
                **({"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"} if rollout.drafts else {}),
            },
        )
        return _host(replace(spec, server=server), self.placement.engine_options(index))

    def teacher(self, _index: int = 0) -> RemoteEngine:
        assert self.teacher_path is not None
        server = self._server("teacher", self.teacher_path, self.config.teacher.devices)
        server = replace(server, flags=teacher_flags(self.config, self.device))
        spec = self._spec("teacher", "teacher_host.log")
        spec = replace(spec, server=server, update_timeout_s=self.config.teacher.timeout_s)
        return _host(spec, self.placement.teacher_options())

    def _spec(self, name: str, log: str) -> HostSpec:
        visibility = self.device.visibility
        return HostSpec(
            name=name,
            start_timeout_s=self.config.rollout.start_timeout_s,
            update_timeout_s=self.config.weight_sync.timeout_s,
            stall_timeout_s=self.config.rollout.stall_timeout_s,
            log=self.run_folder / "logs" / log,
            devices=None if visibility is None else (self.device.resource, visibility),
        )

    def _server(self, name: str, model: Path, width: int) -> ServerSpec:
        """Return a server with a free port and a random key, without flags."""
        return ServerSpec(
            name=name,
            model_path=str(model),
            port=0,
            key=secrets.token_urlsafe(24),
            flags={},
            environment={**self.device.engine_env, **engine_threads(self.config, self.device, width)},
            log=self.run_folder / "logs" / f"{name.replace(' ', '_')}.log",
            fork=self.fork,
        )


def _host(spec: HostSpec, options: Mapping[str, Any]) -> RemoteEngine:
    actor = ray.remote(EngineHost).options(max_concurrency=4096, **options).remote(spec)
    return RemoteEngine(spec.name, actor)


def engine_threads(config: RunConfig, device: Device, width: int) -> dict[str, str]:
    """Return the environment that gives an engine of `width` ranks on a CPU its share of the cores."""
    if device.kind is not DeviceKind.cpu:
        return {}

    processes = config.engines * config.rollout.tensor_parallel + config.teacher_devices
    threads = {"OMP_NUM_THREADS": str(threads_of(config, processes))}
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


def threads_of(config: RunConfig, processes: int) -> int:
    """Return the threads of each of `processes` processes. In fully_async all of them compute at the same time."""
    cores = os.cpu_count() or 1
    if not config.placement.colocated:
        processes = config.placement.trainer_ranks + config.placement.engine_devices + config.teacher_devices
    return max(1, cores // processes)
