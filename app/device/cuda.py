"""NVIDIA GPUs, with their kernels of attention.

torch calls its switch to FlashAttention a prototype, so its kernels are tried when a model is loaded. Those that fail
or differ from torch's default ones on a small batch, are not used. Of the others the fastest are, by a forward and a
backward pass of a packed microbatch with the model's heads.
"""

import logging
from collections.abc import Callable
from math import inf
from statistics import median
from typing import TYPE_CHECKING, Any

from app.config.device import DeviceKind
from app.device.base import FLA_KERNELS, Device

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)
CAPABILITIES = (9, 10)  # major compute capability of Hopper and Blackwell
DEFAULT = "FA2"
IMPLEMENTATIONS = ("FA4", "FA3")
TOLERANCE = 0.02  # relative to the largest value, in bfloat16
LENGTHS = (70, 33, 153)  # of the sequences that are compared
TIMED = (2048,) * 4  # and of those that are timed
REPETITIONS = 5
Heads = tuple[int, int, int]  # of queries, of keys and values, and their width


def activate_flash_attention(heads: Heads) -> str:
    """Activate the fastest implementation of FlashAttention for these heads, the same one on all ranks.

    A collective of the default process group, if there is one: an implementation is as slow as on its slowest rank,
    and is not used if it does not work on one.

    Returns:
        Name of the implementation. FA2, torch's default, stays where no other works, and then nothing is timed.
    """
    import torch
    import torch.distributed as dist
    from torch.nn import attention

    activate = getattr(attention, "activate_flash_attention_impl", None)
    restore = getattr(attention, "restore_flash_attention_impl", None)
    milliseconds = {DEFAULT: 0.0, **dict.fromkeys(IMPLEMENTATIONS, inf)}
    if activate is not None and restore is not None and torch.cuda.get_device_capability()[0] in CAPABILITIES:
        milliseconds |= _milliseconds(heads, activate, restore)

    slowest = torch.tensor(list(milliseconds.values()), dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
    found = dict(zip(milliseconds, slowest.tolist(), strict=True))
    used = min(found, key=found.__getitem__)
    if activate is not None and used != DEFAULT:
        activate(used)
    timed = ", ".join(f"{name} {time:.2f} ms" for name, time in found.items() if 0 < time < inf)
    log.info("attention kernels: %s%s", used, f" ({timed})" if timed else "")
    return used


def _milliseconds(heads: Heads, activate: Callable[[str], Any], restore: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of each implementation that works, the default one among them; empty if only that does."""
    try:
        expected = _outputs(heads)
    except TypeError:  # an older torch has the switch, but no grouped heads
        return {}

    found = {}
    for implementation in IMPLEMENTATIONS:
        try:
            activate(implementation)
            pairs = zip(_outputs(heads), expected, strict=True)
            if all(((one - other).abs().max() / other.abs().max()).item() <= TOLERANCE for one, other in pairs):
                found[implementation] = _time(heads)
            else:
                log.warning("%s is not used: it differs from torch's default kernels", implementation)
        # Whatever a prototype raises: the default kernels work.
        except Exception as error:
            log.info("%s is not used: %s: %s", implementation, type(error).__name__, error)
        restore()
    return found and {DEFAULT: _time(heads), **found}


def _outputs(heads: Heads) -> "list[Tensor]":
    """Attention of a small packed batch, and the gradients of its inputs."""
    import torch

    inputs = _inputs(heads, LENGTHS)
    out = _attention(inputs, LENGTHS)
    return [out, *torch.autograd.grad(out.float().square().sum(), inputs)]


def _time(heads: Heads) -> float:
    """Median milliseconds of a forward and a backward pass."""
    import torch

    inputs = _inputs(heads, TIMED)
    gradient = inputs[0].detach()
    times = []
    for _ in range(1 + REPETITIONS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.autograd.grad(_attention(inputs, TIMED), inputs, gradient)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return median(times[1:])  # the first may compile


def _inputs(heads: Heads, lengths: tuple[int, ...]) -> "list[Tensor]":
    """Queries, keys and values of packed sequences: [T, heads, width] each."""
    import torch

    generator = torch.Generator("cuda").manual_seed(0)
    queries, shared, width = heads
    options: dict[str, Any] = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
    shapes = ((sum(lengths), number, width) for number in (queries, shared, shared))
    return [torch.randn(shape, **options).requires_grad_() for shape in shapes]


def _attention(inputs: "list[Tensor]", lengths: tuple[int, ...]) -> "Tensor":
    import torch
    from torch.nn.attention.varlen import varlen_attn

    ends = torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)
    longest = max(lengths)
    query, key, value = inputs
    out = varlen_attn(query, key, value, ends, ends, longest, longest, window_size=(-1, 0), enable_gqa=True)
    assert isinstance(out, torch.Tensor)  # without auxiliary outputs
    return out


DEVICE = Device(
    kind=DeviceKind.cuda,
    torch_type="cuda",
    collective="nccl",
    resource="GPU",
    visibility="CUDA_VISIBLE_DEVICES",
    # FlashInfer's sum over ranks with a norm, SGLang's choice for Qwen3.5 on Hopper, scales by 1 + weight in bfloat16:
    # a weight of 0.001 would be 0 or 0.0078.
    engine_flags={"device": "cuda", "enforce-disable-flashinfer-allreduce-fusion": True},
    # Both sides of a process group must agree on cuMem. Graphs stay out of the memory saver's pool
    # (SGLANG_MEMORY_SAVER_CUDA_GRAPH is not set): with NCCL's registered buffers they hang there.
    engine_env={"POSTTRAIN_ENGINE_DEVICE": "cuda", "NCCL_CUMEM_ENABLE": "0", "NCCL_GRAPH_REGISTER": "0"},
    trainer_env={"NCCL_CUMEM_ENABLE": "0", "NCCL_GRAPH_REGISTER": "0"},
    fused_optimizer=True,
    compiles=True,
    head_chunk=2**27,
    activate_attention=activate_flash_attention,
    linear_attention="fla-core",
    linear_kernels=FLA_KERNELS,
    toolkit=("nvidia-smi",),
    allocator_variables=("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
    memory_query=("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"),
    # NVIDIA's datasheets, without sparsity.
    peaks={
        r"\b(H100|H800) PCIe\b": 756.0,
        r"\bH(100|200) NVL\b": 835.0,
        r"\b(H100|H200|H800|GH200)\b": 989.0,
        r"\bH20\b": 148.0,
        r"\b(A100|A800)\b": 312.0,
        r"\bB200\b": 2250.0,
        r"\bL40S\b": 362.0,
    },
    card="an 80 GB H100",
    card_memory_gib=80.0,
    peak_tflops=989.0,
    memory_gb_per_s=3350.0,
    trainer_runtime_gib=1.5,
    engine_runtime_gib=4.0,  # with the decode graphs, which no release frees
    push_seconds_per_gb=0.12,
)
