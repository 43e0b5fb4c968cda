"""NVIDIA GPUs, with their kernels of attention.

torch calls its switch to FlashAttention a prototype, so the kernels are compared with torch's default ones once, on a
small batch with the model's head width. Kernels that fail or differ are not used.
"""

import logging
from typing import TYPE_CHECKING

from app.config.device import DeviceKind
from app.device.base import FLA_KERNELS, Device

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)
CAPABILITIES = (9, 10)  # major compute capability of Hopper and Blackwell
IMPLEMENTATIONS = ("FA4", "FA3")  # fastest first
TOLERANCE = 0.02  # relative to the largest value, in bfloat16
LENGTHS = (70, 33, 153)


def activate_flash_attention(head_dim: int) -> str | None:
    """Activate FlashAttention 4 or 3 for heads of this width.

    Returns:
        Name of the kernels, or None if torch's default ones stay: this torch has no switch, the card lacks the
        instructions, or no installed implementation matches the default.
    """
    import torch
    from torch.nn import attention

    activate = getattr(attention, "activate_flash_attention_impl", None)
    restore = getattr(attention, "restore_flash_attention_impl", None)
    if activate is None or restore is None or torch.cuda.get_device_capability()[0] not in CAPABILITIES:
        return None
    try:
        expected = _outputs(head_dim)
    except TypeError:  # an older torch has the switch, but no grouped heads
        return None

    for implementation in IMPLEMENTATIONS:
        try:
            activate(implementation)
            pairs = zip(_outputs(head_dim), expected, strict=True)
            if all(((one - other).abs().max() / other.abs().max()).item() <= TOLERANCE for one, other in pairs):
                return implementation
            log.warning("%s is not used: it differs from torch's default kernels", implementation)
        # Whatever a prototype raises: the default kernels work.
        except Exception as error:
            log.info("%s is not used: %s: %s", implementation, type(error).__name__, error)
        restore()
    return None


def _outputs(head_dim: int) -> "list[Tensor]":
    """Attention of a small packed batch with grouped heads, and the gradients of its inputs."""
    import torch
    from torch.nn.attention.varlen import varlen_attn

    generator = torch.Generator().manual_seed(0)
    tokens = sum(LENGTHS)

    def random(heads: int) -> "Tensor":
        values = torch.randn(tokens, heads, head_dim, generator=generator)
        return values.to("cuda", torch.bfloat16).requires_grad_()

    query, key, value = random(4), random(2), random(2)
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).to("cuda", torch.int32)
    longest = max(LENGTHS)
    out = varlen_attn(query, key, value, ends, ends, longest, longest, window_size=(-1, 0), enable_gqa=True)
    assert isinstance(out, torch.Tensor)  # without auxiliary outputs
    return [out, *torch.autograd.grad(out.float().square().sum(), (query, key, value))]


DEVICE = Device(
    kind=DeviceKind.cuda,
    torch_type="cuda",
    collective="nccl",
    resource="GPU",
    visibility="CUDA_VISIBLE_DEVICES",
    engine_flags={"device": "cuda"},
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
    steps_in_place=True,
)
