"""Attention that keeps packed sequences apart, under a name of its own in transformers' `AttentionInterface`.

`packed_sdpa` runs torch's causal scaled-dot-product attention on buckets of similar length: exact, on every device and
dtype, and the fastest on CPU. Where a varlen kernel exists, `flash_attention_2` takes the same borders through
transformers (`cu_seq_lens_q` …). Linear attention (Qwen3.5's gated delta-net) must not see over a border either:
`keep_apart` runs such a mixer on the same buckets, which is right with any kernel, torch's reference included.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from app.model.hub import transformers
from app.model.packing import Packing

PACKED_SDPA = "packed_sdpa"


@cache
def register() -> None:
    """Make `packed_sdpa` known to transformers. No mask is ever made for it: the borders say all."""
    transformers().AttentionInterface.register(PACKED_SDPA, packed_sdpa)
    transformers().AttentionMaskInterface.register(PACKED_SDPA, _no_mask)


def packed_sdpa(
    module: nn.Module,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, K, T, D]
    value: Tensor,  # [1, K, T, D]
    attention_mask: Tensor | None,
    *,
    packing: Packing,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,  # what transformers hands to every implementation
) -> tuple[Tensor, None]:
    """Causal attention within each packed sequence; [1, T, H, D]."""
    if sliding_window is not None and sliding_window < packing.longest:
        raise NotImplementedError(f"{PACKED_SDPA} has no sliding window, and the model asks for {sliding_window}")
    heads = query.shape[1]
    mixed = []
    padded = (packing.pad(tensor.squeeze(0).transpose(0, 1)) for tensor in (query, key, value))
    for parts in zip(*padded, strict=True):
        q, k, v = (part.transpose(1, 2) for part in parts)  # [B, heads, L, D]
        out = scaled_dot_product_attention(q, _repeat(k, heads), _repeat(v, heads), is_causal=True, scale=scaling)
        mixed.append(out.transpose(1, 2))
    return packing.unpad(mixed).unsqueeze(0), None


def keep_apart(mixer: nn.Module) -> None:
    """Make a linear-attention module treat its packed input bucket by bucket (its parameters stay where they are)."""
    forward: Callable[..., Tensor] = mixer.forward

    def per_bucket(hidden_states: Tensor, *, packing: Packing, **_: Any) -> Tensor:
        mixed = [forward(hidden_states=bucket) for bucket in packing.pad(hidden_states.squeeze(0))]
        return packing.unpad(mixed).unsqueeze(0)

    mixer.forward = per_bucket


def _repeat(grouped: Tensor, heads: int) -> Tensor:
    """Key or value heads [B, K, L, D] → [B, H, L, D]: as fast as torch's `enable_gqa` on CPU; every kernel takes it."""
    batch, kept, length, width = grouped.shape
    if kept == heads:
        return grouped
    repeated = grouped[:, :, None].expand(batch, kept, heads // kept, length, width)
    return repeated.reshape(batch, heads, length, width)


def _no_mask(*_: Any, **__: Any) -> None:
    return None
