"""One rank of the trainer: a Ray actor with its shard of the model, its optimizer and its part of every step.

All ranks get the same calls in the same order. Other parts (the weight sync's sender, memory offload) are attached by
whoever introduces them, so that this module knows none of them.
"""

import gc
import os
import random
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import ray
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from app.config.device import DeviceKind, Dtype
from app.config.trainer import TrainerConfig
from app.device import device_of
from app.device.torchvision_shim import define_operators
from app.errors import TrainerError
from app.trainer.checkpoint_state import RankState, host_copy
from app.trainer.optimizer import Optimizer
from app.trainer.profile import FOLDER, StepProfiler
from app.trainer.step import StepSettings, TrainStep
from app.types import MemoryUse, ScoredGroup, StepReport, TrainerMemory
from app.utils.net import bracketed, free_port
from app.utils.process import log_to, memory_use

THREADS = {"answers": 1, "checkpoint": 1}  # Ray's concurrency groups: what runs beside the step


@dataclass(frozen=True, slots=True)
class RankSpec:
    """What a rank is made with; the same for all ranks."""

    device: DeviceKind
    dtype: Dtype  # compute
    model_path: Path
    trust_remote_code: bool
    trainer: TrainerConfig
    step: StepSettings
    reference: bool  # whether a frozen copy of the first policy is kept
    ranks: int
    threads: int  # per rank, on CPU
    seed: int
    logs: Path  # folder
    profile_steps: tuple[int, ...] = ()


class MemoryOffload(Protocol):
    """Moves a rank's memory regions between its device and the host."""

    def offload(self, region: TrainerMemory) -> None: ...

    def onload(self, region: TrainerMemory) -> None: ...

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a local tensor in host memory, also of an offloaded one."""
        ...


F = TypeVar("F", bound=Callable[..., Any])


def runs_beside_the_step(concurrency_group: str) -> Callable[[F], F]:
    """Run a method in a Ray concurrency group of its own. The method keeps its type."""
    return cast(Callable[[F], F], ray.method(concurrency_group=concurrency_group))


class TrainerRank:
    """Built in two phases: the actor first, then `setup` on all ranks at once (it enters collectives)."""

    def __init__(self, spec: RankSpec, rank: int):
        log_to(spec.logs / f"trainer_{rank}.log")
        self.spec, self.rank = spec, rank
        self.device = device_of(spec.device)
        self.extensions: dict[str, Any] = {}
        self.memory_offload: MemoryOffload | None = None
        self.offloaded: set[TrainerMemory] = set()  # what a part of this rank has taken off the device
        self.profiler = StepProfiler(spec.profile_steps, spec.logs.parent / FOLDER, rank)

    def node_address(self) -> str:
        return ray.util.get_node_ip_address()

    def free_port(self) -> int:
        return free_port(host="")

    def setup(self, address: str, port: int) -> int:
        """Join the ranks, load the model; returns the number of parameters."""
        define_operators()
        from app.model.load import load

        torch.set_num_threads(self.spec.threads)
        random.seed(self.spec.seed)
        np.random.seed(self.spec.seed)
        torch.manual_seed(self.spec.seed)
        if self.device.plugin:
            __import__(self.device.plugin)
        self.torch_device = self.device.torch_device(self._device_index())
        if self.device.torch_type != "cpu":
            torch.get_device_module(self.device.torch_type).set_device(self.torch_device)
        dist.init_process_group(
            backend=self._backends(),
            init_method=f"tcp://{bracketed(address)}:{port}",
            rank=self.rank,
            world_size=self.spec.ranks,
            timeout=timedelta(seconds=self.spec.trainer.timeout_s),
        )
        mesh = init_device_mesh(self.device.torch_type, (self.spec.ranks,))
        make = lambda: load(  # noqa: E731
            self.spec.model_path,
            mesh=mesh,
            device=self.torch_device,
            compute_dtype=getattr(torch, self.spec.dtype.name),
            attention=self.device.attention,
            activation_checkpointing=self.spec.trainer.activation_checkpointing,
            trust_remote_code=self.spec.trust_remote_code,
        )
        self.model = make()
        self.reference = make().requires_grad_(False) if self.spec.reference else None
        self.optimizer = Optimizer(self.model.parameters(), self.spec.trainer)
        self.step = TrainStep(
            self.model, self.optimizer, self.spec.step, self.torch_device, self.reference, self._peak_flops()
        )
        self.state = RankState(self.model, self.optimizer, self.torch_device, timeout_s=self.spec.trainer.timeout_s)
        disable_automatic_gc()
        return sum(parameter.numel() for parameter in self.model.parameters())

    def _device_index(self) -> int:
        """Which of the devices that this process sees is its own: Ray shows some kinds one device, others all."""
        own = [str(each) for each in ray.get_runtime_context().get_accelerator_ids().get(self.device.resource, [])]
        shown = [each for each in os.environ.get(self.device.visibility or "", "").split(",") if each]
        if not own:
            return 0
        return shown.index(own[0]) if own[0] in shown else int(own[0])

    def _peak_flops(self) -> float | None:
        """Of one device, FLOP/s, where it is known: for bfloat16."""
        peak = self.device.peak_tflops
        return None if peak is None or self.spec.dtype is not Dtype.bfloat16 else 1e12 * peak

    def _backends(self) -> str:
        """Collectives of small numbers run on the host, whatever the device's own backend is."""
        own = self.device.collective
        return own if self.device.torch_type == "cpu" else f"cpu:gloo,{self.device.torch_type}:{own}"

    # --- the step

    def begin_step(self, version: int) -> None:
        self.require_onloaded("begin_step", *TrainerMemory)
        gc.collect()
        self.step.begin(version)
        self.profiler.begin(version)

    def add_groups(self, groups: Sequence[ScoredGroup]) -> None:
        self.step.feed(groups)

    def old_logprobs(self, groups: Sequence[ScoredGroup]) -> None:
        self.step.old_logprobs(groups)

    def finish_step(self) -> StepReport:
        report = self.step.finish()
        self.profiler.finish(report.version)
        return report

    def abort_step(self) -> None:
        self.profiler.abort()
        self.step.abort()

    def version(self) -> int | None:
        return self.step.version

    # --- checkpoints

    def checkpoint_bytes(self) -> int:
        return self.state.bytes

    def capture(self) -> int:
        self._require_closed("capture")
        return self.state.capture(self.memory_offload.copy if self.memory_offload else host_copy)

    @runs_beside_the_step("checkpoint")
    def write(self, folder: Path) -> None:
        """In a thread of its own, so that steps go on."""
        self.state.write(folder)

    def restore(self, folder: Path, version: int) -> None:
        self._require_closed("restore")
        self.require_onloaded("restore", *TrainerMemory)
        self.state.restore(folder)
        self.step.version = version

    def ready(self) -> None:
        """Return when everything that was asked for before is done, also on the device."""
        if self.device.torch_type != "cpu":
            torch.get_device_module(self.device.torch_type).synchronize(self.torch_device)

    def require_onloaded(self, call: str, *parts: TrainerMemory) -> None:
        """Raise `TrainerError` if one of these parts is offloaded: what is read then would be nonsense."""
        missing = [part.name for part in parts if part in self.offloaded]
        if missing:
            raise TrainerError(f"trainer rank {self.rank}: {call} while offloaded: {', '.join(missing)}")

    def _require_closed(self, call: str) -> None:
        if self.step.open:
            raise TrainerError(f"{call} while a step is open: finish or abort it first")

    # --- memory offload

    def attach_offload(self, make: Callable[["TrainerRank"], MemoryOffload]) -> None:
        """Set who offloads this rank's memory; `make` is a function of a module, since it is sent by name."""
        self.memory_offload = make(self)

    def offload(self, region: TrainerMemory) -> None:
        self._offload_or_raise().offload(region)

    def onload(self, region: TrainerMemory) -> None:
        self._offload_or_raise().onload(region)

    def _offload_or_raise(self) -> MemoryOffload:
        if self.memory_offload is None:
            raise TrainerError(f"trainer rank {self.rank}: no memory offload is attached")
        return self.memory_offload

    # --- extensions

    def attach(self, name: str, make: Callable[["TrainerRank"], Any]) -> None:
        """Give this rank a further part; `make` is a function of a module, so it travels by name."""
        self.extensions[name] = make(self)

    def call(self, name: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return getattr(self.extensions[name], method)(*args, **kwargs)

    # --- answers while the rank is busy (a thread of their own)

    @runs_beside_the_step("answers")
    def stacks(self) -> str:
        """What every thread of this rank is doing right now."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        return "\n".join(
            f"--- rank {self.rank} pid {os.getpid()} thread {names.get(ident, ident)}\n"
            + "".join(traceback.format_stack(frame))
            for ident, frame in sys._current_frames().items()
        )

    @runs_beside_the_step("answers")
    def memory(self) -> MemoryUse:
        """Also the device's peak since this was asked last."""
        if self.device.torch_type == "cpu":
            return memory_use([os.getpid()])
        module = torch.get_device_module(self.device.torch_type)
        peak = int(module.max_memory_allocated(self.torch_device))
        module.reset_peak_memory_stats(self.torch_device)
        return replace(memory_use([os.getpid()]), device_peak=peak)

    @runs_beside_the_step("answers")
    def pid(self) -> int:
        return os.getpid()


def disable_automatic_gc() -> None:
    """From now on `gc.collect` alone does it, at the same place on every rank: one that stops for it stops all."""
    gc.collect()
    gc.freeze()  # what is there stays
    gc.disable()
