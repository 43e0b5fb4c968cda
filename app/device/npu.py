"""Ascend NPUs. Not yet run on hardware: taken from the documentation of torch_npu, SGLang and CANN."""

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from app.config.device import DeviceKind
from app.config.engine_flags import STATE_FLAG
from app.device.base import FLA_KERNELS, Device, Elementwise

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MASK_SIZE = 2048  # of the compressed causal mask that the kernel expects
CAUSAL_DOWN_RIGHT = 3  # sparse mode


def fusion_attention(
    query: "Tensor",  # [T, H, D]
    key: "Tensor",  # [T, K, D]
    value: "Tensor",  # [T, K, D]
    boundaries: Sequence[int],  # S + 1: 0, then the end of each sequence
    scale: float,
) -> "Tensor":
    """Causal attention within each sequence, in 16 bits: [T, H, D].

    The arguments are those of transformers' `npu_flash_attn_varlen_func`, except that the sequence boundaries come from
    the host: reading them from the device would make every layer wait for it.
    """
    from torch_npu import npu_fusion_attention

    ends = tuple(boundaries[1:])
    return npu_fusion_attention(
        query,
        key,
        value,
        query.shape[1],
        "TND",
        atten_mask=_mask(query.device),
        scale=scale,
        actual_seq_qlen=ends,
        actual_seq_kvlen=ends,
        sparse_mode=CAUSAL_DOWN_RIGHT,
    )[0]


@cache
def _mask(device: "torch.device") -> "Tensor":
    import torch

    return torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool, device=device).triu(1)


def rms_norm(hidden: "Tensor", weight: "Tensor", epsilon: float) -> "Tensor":
    """RMS norm over the last dimension, computed in float32."""
    from torch_npu import npu_rms_norm

    return npu_rms_norm(hidden, weight, epsilon=epsilon)[0]


def swiglu(gate_and_up: "Tensor") -> "Tensor":
    """SiLU of the first half of the last dimension, times the second half."""
    from torch_npu import npu_swiglu

    return npu_swiglu(gate_and_up, dim=-1)


def rotate(heads: "Tensor", cosines: "Tensor", sines: "Tensor") -> "Tensor":
    """Rotary embedding by halves. The operator takes up to 1,000 heads of an even width below 896."""
    from torch_npu import npu_rotary_mul

    return npu_rotary_mul(heads, cosines, sines)


HCCL = {
    # Links are made by a group's first collective, and no abort ends a rank that waits for one: this is how long an
    # engine that died before a sync's first broadcast holds the trainer. HCCL's own default is 120.
    "HCCL_CONNECT_TIMEOUT": "300",
    # Otherwise several processes on one device would clash on HCCL's fixed port.
    "HCCL_HOST_SOCKET_PORT_RANGE": "auto",
    "HCCL_NPU_SOCKET_PORT_RANGE": "auto",
    "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES": "1",
}


def abort_backend(backend: Any) -> None:
    """End everything in flight. The `abort` that every torch backend has does nothing in HCCL's."""
    backend.abort_hccl_comm("weight sync failed")


DEVICE = Device(
    kind=DeviceKind.npu,
    torch_type="npu",
    collective="hccl",
    resource="NPU",
    visibility="ASCEND_RT_VISIBLE_DEVICES",
    attention_kernel=fusion_attention,
    linear_attention="fla-core",
    linear_kernels=FLA_KERNELS,
    has_gather=False,
    engine_fraction=0.7,
    abort_backend=abort_backend,
    # Atlas A2's and A3's kernel of linear attention takes no float32 state, and SGLang 0.5.23 makes one.
    engine_flags={"device": "npu", STATE_FLAG: "bfloat16"},
    engine_env={
        "POSTTRAIN_ENGINE_DEVICE": "npu",
        **HCCL,
        "ASCEND_COREDUMP_SIGNAL": "none",
        # torch_npu refuses to capture decode graphs at level 2, which a user may have exported for training.
        "TASK_QUEUE_ENABLE": "1",
    },
    trainer_env={**HCCL, "ASCEND_COREDUMP_SIGNAL": "none"},
    # Sources, and variables that are left alone: docs/clusters.md.
    trainer_defaults={"TASK_QUEUE_ENABLE": "2", "CPU_AFFINITY_CONF": "1"},
    expandable_segments=True,
    elementwise=Elementwise(rms_norm, swiglu, rotate),
    # torch_npu 2.10.0.post7 registers `_fused_adamw_`, one kernel a parameter; torch 2.10 accepts `fused=True` for it.
    fused_optimizer=True,
    lora_backend="ascend",
    plugin="torch_npu",
    packages={
        "torch_npu": "the device backend of torch; its version starts with torch's version",
        "sgl_kernel_npu": "SGLang's kernels, from a release of sgl-kernel-npu",
        "triton_ascend": "compiles the kernels of linear attention",
    },
    toolkit=("npu-smi", "info"),
    allocator_variables=("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
    machine_env={"RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES": "1"},
    # Cube cores × 16³ multiply-adds × clock in CANN's platform_config/<chip>.ini: 24 at 1.85 or 1.8 GHz, 20 at 1.8 or
    # 1.5 (910_9392, 910_9381 and 910B4-1 like their sisters). The 376, 313 and 280 of data sheets are for float16.
    peaks={
        r"910B1$|910_939[12]$": 363.7,
        r"910B2C?$|910_938[12]$": 353.9,
        r"910B3$": 294.9,
        r"910B4(-1)?$|910_9362$": 245.8,
    },
    card="a 64 GB Atlas A2 card or A3 die",
    card_memory_gib=64.0,
    peak_tflops=353.9,
    memory_gb_per_s=1600.0,
    trainer_runtime_gib=2.0,
    engine_runtime_gib=4.0,  # with the decode graphs, which no release frees
    push_seconds_per_gb=0.19,
    # Beside CUDA's: three float32 matrices of a chunk's tokens by each other; until then, the convolution before its
    # activation.
    linear_widths=4.0,
    linear_widths_kept=3.0,
    softmax_width=16,
)
