"""Ascend's fused attention over packed sequences.

The arguments are those of transformers' `npu_flash_attn_varlen_func`, except that the sequence boundaries come from
the host: reading them from the device would make every layer wait for it.
"""

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

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
    """Causal attention within each sequence, in 16 bits: [T, H, D]."""
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
