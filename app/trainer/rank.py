"""One rank of the trainer: a Ray actor with its shard of the model and its share of every step.

All ranks get the same calls in the same order. Memory offload and extensions (such as the weight sync's sender) are
attached by their owners; this module does not import them.

The driver imports this module to name the actor and its methods, so it imports torch in `setup` and not before.
"""

import gc
import importlib
import logging
import os
import random
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import ray

from app.config.algorithm import AlgorithmConfig, Correction
from app.config.device import DeviceKind, Dtype
from app.config.model import LoraConfig
from app.config.teacher import TeacherConfig
from app.config.trainer import TrainerConfig
from app.device import device_of
from app.device.torchvision_shim import define_operators
from app.errors import TrainerError
from app.types import MemoryUse, ScoredGroup, StepReport, TokenSequence, TrainerMemory
from app.utils.child_environment import for_children, replace_environment
from app.utils.net import listen
from app.utils.process import log_to, memory_use

if TYPE_CHECKING:
    from app.model.policy import PolicyModel
    from app.trainer.step import StepSettings

log = logging.getLogger(__name__)
OFFLOAD = "offload"  # the extension that moves memory regions, see app/offload/
# Ray's concurrency groups: calls that run in their own thread, concurrently with the step.
CONCURRENCY_GROUPS = {"status": 1, "checkpoint": 1, "interrupt": 1}
F = TypeVar("F", bound=Callable[..., Any])


def runs_concurrently(concurrency_group: str) -> Callable[[F], F]:
    """Run a method in a Ray concurrency group. Unlike `ray.method`, keep the method's type."""
    return cast(Callable[[F], F], ray.method(concurrency_group=concurrency_group))


@dataclass(frozen=True, slots=True)
class RankSpec:
    """Settings of a rank, the same for all ranks."""

    device: DeviceKind
    dtype: Dtype  # compute; trained parameters are float32
    model_path: Path
    trust_remote_code: bool
    trainer: TrainerConfig
    run_updates: int  # optimizer updates of the whole run
    algorithm: AlgorithmConfig
    correction: Correction  # resolved, never `auto`
    temperature: float
    max_completion_tokens: int
    reference: bool  # whether to keep the initial policy: a frozen copy, or with adapters the base that they adapt
    ranks: int
    threads: int  # per rank, on CPU
    seed: int
    logs: Path  # folder
    profile_steps: tuple[int, ...] = ()
    supervised: bool = False
    moments_on_host: bool = False  # Adam's, between its updates
    lora: LoraConfig = field(default_factory=LoraConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    environment: Mapping[str, str] = field(default_factory=dict)  # variables, added to this process's

    @property
    def step_settings(self) -> "StepSettings":
        from app.trainer.step import StepSettings

        return StepSettings(
            algorithm=self.algorithm,
            correction=self.correction,
            temperature=self.temperature,
            max_completion_tokens=self.max_completion_tokens,
            tokens_per_microbatch=self.trainer.tokens_per_microbatch,
            teacher=self.teacher,
        )


class TrainerRank:
    """A trainer rank.

    Lifecycle:
        1. Create the actor.
        2. `start`, then `setup`, each on all ranks at once: `setup` runs collectives.
        3. `attach` for each extension, `OFFLOAD` among them.
        4. Steps: `begin_step` → `add_groups`, `add_demonstrations` … → `finish_step` or `abort_step`.
        5. Between steps: `offload`, `onload` and `restore`; or before the updates of one: `capture` → `write`.
    """

    def __init__(self, spec: RankSpec, rank: int):
        log_to(spec.logs / f"trainer_{rank}.log")
        # Not as Ray's `env_vars`: Ray 2.60 starts such workers by `bash -c` and does not quote the interpreter, so that
        # none starts where its path has a space ("worker startup repeatedly failed"). Before torch is imported.
        replace_environment({**for_children(os.environ), **spec.environment})
        self.spec = spec
        self.rank = rank
        self.device = device_of(spec.device)
        self.accelerator: Any = None  # torch's module of the device type, from `setup` on; None on a CPU
        self.attention: str | None = None
        self.extensions: dict[str, Any] = {}
        self.offloaded: set[TrainerMemory] = set()
        self._rendezvous: socket.socket | None = None  # of rank 0
        self._port = 0  # of it, also once the store has taken the socket

    # --- setup

    def start(self) -> tuple[str, int]:
        """Return the address of this rank's node and the port of the rendezvous, which rank 0 opens. Idempotent."""
        address = ray.util.get_node_ip_address()
        if self.rank != 0:
            return address, 0
        if self._rendezvous is None:
            self._rendezvous = listen(address)
            self._port = self._rendezvous.getsockname()[1]
        return address, self._port

    def setup(self, address: str, port: int) -> str | None:
        """Join the process group at this address of rank 0, load the model and make the step. A collective.

        Returns the attention kernels where the device has a choice of them.
        """
        gc.disable()  # before 4,000 modules are imported
        self._select_device()
        self._join_process_group(address, port)
        self._load_models()
        self._make_step()

        # Ranks collect at the same time in `begin_step` and between microbatches: no pause of one stalls the others.
        gc.collect()
        gc.freeze()  # exempts today's objects from later collections
        return self.attention

    def _select_device(self) -> None:
        """Seed the random number generators and select this rank's device."""
        import torch

        random.seed(self.spec.seed)
        np.random.seed(self.spec.seed)
        torch.manual_seed(self.spec.seed)

        torch.set_num_threads(self.spec.threads)
        if self.device.prepare_rank is not None:
            self.device.prepare_rank()
        if self.device.plugin:
            importlib.import_module(self.device.plugin)
        self.torch_device = self.device.torch_device(self._device_index())
        if self.device.torch_type != "cpu":
            self.accelerator = torch.get_device_module(self.device.torch_type)
            self.accelerator.set_device(self.torch_device)

    def _device_index(self) -> int:
        """Return this rank's index among the visible devices."""
        # Ray narrows visibility for some device kinds only.
        assigned = [str(each) for each in ray.get_runtime_context().get_accelerator_ids().get(self.device.resource, [])]
        visible = [each for each in os.environ.get(self.device.visibility or "", "").split(",") if each]
        if not assigned:
            return 0
        return visible.index(assigned[0]) if assigned[0] in visible else int(assigned[0])

    def _join_process_group(self, address: str, port: int) -> None:
        import torch.distributed as dist

        backend = self.device.collective
        if self.accelerator is not None:
            # Gloo, for collectives of host tensors.
            backend = f"cpu:gloo,{self.device.torch_type}:{backend}"

        timeout = timedelta(seconds=self.spec.trainer.timeout_s)
        store = dist.TCPStore(
            address,
            port,
            is_master=self.rank == 0,
            timeout=timeout,
            wait_for_workers=False,
            # Else the store would listen at all addresses of this machine.
            master_listen_fd=self._rendezvous.detach() if self._rendezvous else None,
        )
        dist.init_process_group(
            backend=backend, store=store, rank=self.rank, world_size=self.spec.ranks, timeout=timeout
        )

    def _load_models(self) -> None:
        import torch

        define_operators()
        from app.model.kernels import kernels_of
        from app.model.load import load
        from app.model.parallelize import replica_mesh

        mesh, self.replica_group = replica_mesh(self.device.torch_type, self.spec.ranks, self.spec.trainer.replicas)
        compute_dtype = getattr(torch, self.spec.dtype.name)

        def load_policy(param_dtype: torch.dtype = torch.float32) -> "PolicyModel":
            return load(
                self.spec.model_path,
                mesh=mesh,
                device=self.torch_device,
                param_dtype=param_dtype,
                compute_dtype=compute_dtype,
                kernels=kernels_of(self.device, self.spec.trainer.compile),
                activation_checkpointing=self.spec.trainer.activation_checkpointing,
                trust_remote_code=self.spec.trust_remote_code,
                lora=self.spec.lora,
                seed=self.spec.seed,
            )

        self.model = load_policy()
        if self.device.activate_attention is not None and self.spec.dtype is Dtype.bfloat16:
            self.attention = self.device.activate_attention(self.model.heads)

        # A model of its own, which is not trained. With adapters, the policy without them is the reference.
        copies = self.spec.reference and not self.spec.lora.enabled
        self.reference = load_policy(compute_dtype).requires_grad_(False) if copies else None

    def _make_step(self) -> None:
        from app.trainer.checkpoint_state import RankState
        from app.trainer.host_state import HostTensors
        from app.trainer.optimizer import PolicyOptimizer
        from app.trainer.profiler import StepProfiler
        from app.trainer.step import TrainStep

        spec = self.spec
        self.optimizer = PolicyOptimizer(
            self.model.parameters(),
            spec.trainer,
            run_updates=spec.run_updates,
            fused=self.device.fused_optimizer,
            host=HostTensors(self.torch_device) if spec.moments_on_host else None,
            replica_group=self.replica_group,
        )
        reference = self.model if spec.reference and spec.lora.enabled else self.reference
        self.step = TrainStep(
            self.model, self.optimizer, spec.step_settings, self.torch_device, reference, self._peak_flops()
        )
        self.state = RankState(self.model, self.optimizer, self.torch_device, timeout_s=spec.trainer.timeout_s)
        self.profiler = StepProfiler(spec.profile_steps, spec.logs.parent / "profile", self.rank, spec.supervised)

    def _peak_flops(self) -> float | None:
        """Return the peak FLOP/s of this rank's device; None if it is not known. Known peaks are those of bfloat16."""
        if self.accelerator is None or self.spec.dtype is not Dtype.bfloat16:
            return None
        peak = self.device.peak_tflops_of(self.accelerator.get_device_name(self.torch_device))
        return None if peak is None else 1e12 * peak

    # --- the step

    def begin_step(self, version: int) -> None:
        """Open a step. Ranks collect garbage here, since automatic GC is off."""
        self.require_onloaded("begin_step", *TrainerMemory)
        gc.collect()
        self.step.begin(version)
        self.profiler.begin(version)

    def add_groups(self, groups: Sequence[ScoredGroup]) -> None:
        self.step.add_groups(groups)

    def add_demonstrations(self, sequences: Sequence[TokenSequence]) -> None:
        self.step.add_demonstrations(sequences)

    def logprobs(self, sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
        self.require_onloaded("logprobs", TrainerMemory.parameters)
        return self.step.logprobs(sequences)

    def old_logprobs(self, groups: Sequence[ScoredGroup]) -> None:
        self.step.old_logprobs(groups)

    def finish_step(self) -> StepReport:
        return self.profiler.after(self.step.finish())

    def abort_step(self) -> None:
        """Discard the open step. Frees the memory of a failed pass first: the reset gathers parameters again."""
        self.profiler.abort()
        # The error of a failed pass may hold its activations in a reference cycle.
        gc.collect()
        if self.accelerator is not None:
            self.accelerator.empty_cache()
        self.step.abort()

    @runs_concurrently("interrupt")
    def hold_passes(self) -> int:
        """Let no further pass of the open step begin. Returns how many have begun."""
        return self.step.gate.hold()

    @runs_concurrently("interrupt")
    def end_passes(self, passes: int) -> None:
        """Make the call in progress raise after this many passes of the open step, the same number on all ranks."""
        self.step.gate.stop_after(passes)

    def version(self) -> int | None:
        return self.step.version

    # --- checkpoints

    def checkpoint_bytes(self) -> int:
        return self.state.bytes

    def capture(self) -> int:
        if self.step.version is None:
            raise TrainerError("capture between the updates of a step: finish it first")
        offload = self.extensions.get(OFFLOAD)
        return self.state.capture(offload.copy if offload else None)

    @runs_concurrently("checkpoint")
    def write(self, folder: Path) -> dict[str, int]:
        """Write the captured state, concurrently with further steps. Returns the CRC-32 of each file, by name."""
        return self.state.write(folder)

    def restore(self, folder: Path, version: int) -> None:
        if self.step.open:
            raise TrainerError("restore while a step is open: finish or abort it first")
        self.require_onloaded("restore", *TrainerMemory)
        self.state.restore(folder)
        self.step.version = version

    # --- preconditions

    def require_onloaded(self, call: str, *regions: TrainerMemory) -> None:
        """Raise `TrainerError` if one of these regions is offloaded: its content would be garbage."""
        offloaded = [region.name for region in regions if region in self.offloaded]
        if offloaded:
            raise TrainerError(f"trainer rank {self.rank}: {call} while offloaded: {', '.join(offloaded)}")

    def offload(self, region: TrainerMemory) -> None:
        self.extensions[OFFLOAD].offload(region)

    def onload(self, region: TrainerMemory) -> None:
        self.extensions[OFFLOAD].onload(region)

    # --- extensions

    def attach(self, name: str, make: Callable[["TrainerRank"], Any]) -> None:
        """Attach `make(rank)` as an extension. `make` is pickled by name: a module-level callable."""
        self.extensions[name] = make(self)

    def call(self, name: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return getattr(self.extensions[name], method)(*args, **kwargs)

    @runs_concurrently("interrupt")
    def interrupt(self, name: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Call a method of an extension concurrently with any other call, to end its waiting."""
        getattr(self.extensions[name], method)(*args, **kwargs)

    # --- status, also during a step

    @runs_concurrently("status")
    def stacks(self) -> str:
        """Return the stack of every thread."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        return "\n".join(
            f"--- rank {self.rank} pid {os.getpid()} thread {names.get(ident, ident)}\n"
            + "".join(traceback.format_stack(frame))
            for ident, frame in sys._current_frames().items()
        )

    @runs_concurrently("status")
    def memory(self) -> MemoryUse:
        """Return the memory in use and, of an accelerator, its peak since the last call."""
        if self.accelerator is None:
            return memory_use([os.getpid()])
        peak = int(self.accelerator.max_memory_allocated(self.torch_device))
        self.accelerator.reset_peak_memory_stats(self.torch_device)
        return replace(memory_use([os.getpid()]), device_peak=peak)

    @runs_concurrently("status")
    def pid(self) -> int:
        return os.getpid()
