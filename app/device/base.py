"""The `Device` type: all properties of a kind of device that shared code uses."""

import importlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from app.config.device import DeviceKind
from app.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

QUERY_TIMEOUT_S = 10


def abort_backend(backend: Any) -> None:
    """End everything in flight in a torch.distributed backend."""
    backend.abort()


class ServerProcess(Protocol):
    """A process of an SGLang server, as asyncio's."""

    pid: int

    async def wait(self) -> int:
        """Wait until it ends; return its exit code, negative for a signal."""


# Forks a server: its arguments, environment and the descriptor of its log. Raises `OSError` where that is impossible.
Fork = Callable[[Sequence[str], Mapping[str, str], int], ServerProcess]


@dataclass(frozen=True, slots=True)
class LinearKernels:
    """Kernels of gated delta-nets over packed sequences. None: torch's."""

    convolve: "Callable[..., Tensor] | None" = None
    delta_rule: "Callable[..., Tensor] | None" = None


# fla-core, which flash-linear-attention brings, for CUDA and NPU. Its kernels take all sequences of a microbatch in one
# call, as one row with boundaries: no padding, and one compilation for any number of them. The boundaries come from the
# host too, where the kernels' grids are computed, and so do the chunks: made from the boundaries by fla, they would be
# copied to the device in a call that waits for it.


def fla_convolve(
    channels: "Tensor", weight: "Tensor", cu_seqlens: "Tensor", host_cu_seqlens: "Tensor", chunk_indices: "Tensor"
) -> "Tensor":
    """Causal convolution with SiLU of [1, T, C] by [C, W], each sequence alone."""
    from fla.modules.causal_conv1d import causal_conv1d

    out, _ = causal_conv1d(
        channels,
        weight,
        activation="silu",
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=host_cu_seqlens,
        chunk_indices=chunk_indices,
    )
    return out


def fla_delta_rule(
    query: "Tensor",  # [1, T, H, K]
    key: "Tensor",  # [1, T, H, K]
    value: "Tensor",  # [1, T, HV, V], HV a multiple of H
    decay: "Tensor",  # [1, T, HV], logarithms
    beta: "Tensor",  # [1, T, HV]
    cu_seqlens: "Tensor",
    host_cu_seqlens: "Tensor",
    chunk_indices: "Tensor",
) -> "Tensor":
    """The gated delta rule on normalized queries and keys, each sequence alone: [1, T, HV, V]."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    out, _ = chunk_gated_delta_rule(
        query,
        key,
        value,
        g=decay,
        beta=beta,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=host_cu_seqlens,
        chunk_indices=chunk_indices,
    )
    return out


FLA_KERNELS = LinearKernels(fla_convolve, fla_delta_rule)


@dataclass(frozen=True, slots=True)
class Elementwise:
    """Fused operators, each in the place of many passes over memory, see `app.model.kernels.fuse_elementwise`."""

    rms_norm: "Callable[[Tensor, Tensor, float], Tensor]"  # [..., C], weight [C] of the same dtype, epsilon → [..., C]
    swiglu: "Callable[[Tensor], Tensor]"  # [..., 2C], the gate first → [..., C]
    rotate: "Callable[[Tensor, Tensor, Tensor], Tensor]"  # [1, T, H, D], cosines and sines [1, T, 1, D] → [1, T, H, D]


@cache  # a plan asks for each variant that it compares
def _queried_gib(command: tuple[str, ...]) -> float | None:
    try:
        result = subprocess.run(command, capture_output=True, timeout=QUERY_TIMEOUT_S, encoding="utf-8")
    except (OSError, subprocess.TimeoutExpired):  # a driver that is slow to load
        return None
    lines = result.stdout.split()
    return float(lines[0]) / 1024 if result.returncode == 0 and lines else None


@dataclass(frozen=True, slots=True)
class Device:
    """All differences between CPU, CUDA and NPU."""

    kind: DeviceKind
    torch_type: str  # torch.device type
    collective: str  # torch.distributed backend
    resource: str  # Ray resource name
    visibility: str | None  # environment variable that selects devices
    has_gather: bool = True  # whether `collective` can gather on one rank alone
    abort_backend: Callable[[Any], None] = abort_backend
    # SGLang server flags. The setting `device.engine_args` overrides them in app/rollout/engine/server_args.py.
    engine_flags: Mapping[str, object] = field(default_factory=dict)
    engine_env: Mapping[str, str] = field(default_factory=dict)
    lora_backend: str = "csgmv"  # SGLang's kernels for adapters
    trainer_env: Mapping[str, str] = field(default_factory=dict)
    trainer_defaults: Mapping[str, str] = field(default_factory=dict)  # the same, where the user's environment has none
    expandable_segments: bool = False  # whether the trainer's allocator uses them where no engine maps its buffers
    # The trainer's 16-bit attention over packed sequences, see app/model/attention.py. None: torch's.
    attention_kernel: "Callable[[Tensor, Tensor, Tensor, Sequence[int], float], Tensor] | None" = None
    # Default of rollout.memory_fraction on devices of an engine's own. The rest has to hold its activations and graphs,
    # and during a weight sync the largest bucket twice. SGLang's own choice for Qwen3.5-9B on 80 GB is 0.756.
    engine_fraction: float = 0.75
    bucket_mib: float = 2048.0  # default of weight_sync.bucket_mib: buffers of a device exist during a sync only
    # The most tokens in an engine's KV cache, which then is only as large as its requests can need, since it takes the
    # machine's memory. None: the cache fills the engine's share of the device.
    max_kv_tokens: int | None = None
    # The fewest requests that an engine accepts at a time, for evaluations if training needs fewer, and the most. 512
    # is the largest decode graph that SGLang captures by default on GPUs below 160 GB; on a 64 GB NPU it is 64 or 256.
    request_bounds: tuple[int, int] = (1, 512)
    # Starts a process that imports SGLang, given an environment and a log; yields what forks servers from it.
    fork_server: Callable[[Mapping[str, str], Path], AbstractContextManager[Fork]] | None = None
    prepare_rank: Callable[[], object] | None = None  # called in each trainer rank before it loads its model
    shares_memory: bool = True  # trainer and engine share device memory, so that offloading frees some
    fused_optimizer: bool = False  # torch has a fused AdamW for this device; its step counters are on the device
    compiles: bool = False  # whether `trainer.compile=auto` compiles
    elementwise: Elementwise | None = None  # None: norms, MLPs and rotary embeddings are transformers' own
    head_chunk: int = 2**26  # logits that the trainer's LM head computes at once
    head_vocabulary: int | None = None  # entries of the vocabulary among them, at most; None: all
    # Switches torch's varlen attention to its fastest kernels for (heads, heads of keys, their width), the same on all
    # ranks, and returns their name.
    activate_attention: Callable[[tuple[int, int, int]], str] | None = None
    # Distribution with kernels that train linear attention. None: transformers computes it in a loop over chunks.
    linear_attention: str | None = None
    linear_kernels: LinearKernels | None = None  # of that distribution
    plugin: str | None = None  # module that registers the device type with torch
    packages: Mapping[str, str] = field(default_factory=dict)  # further required packages → purpose
    toolkit: tuple[str, ...] | None = None  # command that prints driver and devices
    allocator_variables: tuple[str, ...] = ()  # variables that can enable expandable segments
    machine_env: Mapping[str, str] = field(default_factory=dict)  # environment of cluster nodes
    memory_query: tuple[str, ...] | None = None  # command that prints a device's memory in MiB on its first line
    # Pattern of a device's name → peak TFLOP/s, dense bfloat16. The first match counts.
    peaks: Mapping[str, float] = field(default_factory=dict)

    # Estimates for `mode=plan`, where the device cannot be queried.
    card: str = ""  # the card that the numbers below describe
    card_memory_gib: float | None = None  # None: a share of this machine's memory
    peak_tflops: float | None = None  # of that card, dense bfloat16; None: no estimate
    memory_gb_per_s: float | None = None  # bandwidth of that card's memory, 1e9 bytes/s; None: no estimate
    trainer_runtime_gib: float = 0.0  # per rank, not offloadable: context, kernels, collective buffers
    engine_runtime_gib: float = 0.0  # per engine rank
    push_seconds_per_gb: float = 0.0  # weight sync over `collective`
    # Float32 tensors as wide as the values that kernels of linear attention keep: in a backward pass, and until then.
    linear_widths: float = 2.5
    linear_widths_kept: float = 2.5
    softmax_width: int = 1  # float32 statistics that the attention kernel returns for each row of a head

    def torch_device(self, index: int = 0) -> "torch.device":
        """Return the torch device with this index; a CPU has no index."""
        import torch

        return torch.device(self.torch_type if self.kind is DeviceKind.cpu else f"{self.torch_type}:{index}")

    def count(self) -> int:
        """Count the devices on this machine; for the CPU, its cores."""
        if self.kind is DeviceKind.cpu:
            return os.cpu_count() or 1
        import torch

        module = getattr(torch, self.torch_type, None)
        return module.device_count() if module is not None and module.is_available() else 0

    def peak_tflops_of(self, name: str) -> float | None:
        """Return the peak of a device by the name that torch reports; None if it is not known."""
        return next((peak for pattern, peak in self.peaks.items() if re.search(pattern, name)), None)

    def loops_linear_attention(self) -> bool:
        """Whether linear attention trains in a torch loop: there are no kernels for this device, or none installed."""
        if self.linear_attention is None:
            return True
        try:
            version(self.linear_attention)
        except PackageNotFoundError:
            return True
        return False

    def memory_gib(self) -> float | None:
        """Query the memory of one device in GiB without torch, for the CPU this machine's; None if that fails."""
        if self.kind is DeviceKind.cpu:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        if self.memory_query is None or shutil.which(self.memory_query[0]) is None:
            return None
        return _queried_gib(self.memory_query)

    def require(self) -> None:
        """Raise `ConfigError` if this machine has no such device."""
        if self.plugin is not None:
            try:
                importlib.import_module(self.plugin)
            except (ImportError, OSError) as error:
                accepted = "cpu, or run on a machine that has it"
                why = f"{self.plugin} does not import ({error})"
                raise ConfigError("device", self.kind, accepted, why) from None

        if self.count() == 0:
            accepted = "cpu, or run where one is visible"
            raise ConfigError("device", self.kind, accepted, "torch finds no such device on this machine")
