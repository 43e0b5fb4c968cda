"""torch's varlen attention on the FlashAttention kernels of Hopper and Blackwell cards.

torch calls its switch a prototype, so the kernels are compared with torch's default ones once, on a small batch with
the model's head width. Kernels that fail or differ are not used.
"""

import logging
from typing import TYPE_CHECKING

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
        Name of the kernels, or None if torch's default ones stay: this torch has no switch, the card has not the
        instructions, or no implementation is installed that equals the default.
    """
    import torch
    from torch.nn import attention

    activate = getattr(attention, "activate_flash_attention_impl", None)
    restore = getattr(attention, "restore_flash_attention_impl", None)
    if activate is None or restore is None or torch.cuda.get_device_capability()[0] not in CAPABILITIES:
        return None

    expected = _outputs(head_dim)
    for implementation in IMPLEMENTATIONS:
        try:
            activate(implementation)
            if _difference(_outputs(head_dim), expected) <= TOLERANCE:
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


def _difference(ours: "list[Tensor]", theirs: "list[Tensor]") -> float:
    """Largest difference relative to the largest value; NaN counts as infinite."""
    worst = 0.0
    for one, other in zip(ours, theirs, strict=True):
        relative = ((one - other).abs().max() / other.abs().max()).item()
        worst = max(worst, relative if relative == relative else float("inf"))
    return worst
