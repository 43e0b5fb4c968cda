"""FLOPs of the matrix products of a computation on a CPU, counted from the shapes of the operators that ran."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

Shape = tuple[int, ...]


def matrix_flops(run: Callable[[], Any]) -> int:
    """Return the FLOPs of matrix products and attention, forward and backward. A product [M, K] x [K, N] has 2 MKN."""
    aten = torch.ops.aten
    # Operators of the CPU that torch's own table lacks.
    table = {
        aten.addmm_: _addmm_,
        aten._scaled_dot_product_flash_attention_for_cpu: _attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    }
    with FlopCounterMode(display=False, custom_mapping=table) as counter:
        run()
    return counter.get_total_flops()


def _addmm_(total: Shape, left: Shape, right: Shape, **_: Any) -> int:
    return 2 * left[0] * left[1] * right[1]


def _attention(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """Two products: scores, then values. The causal half counts in full, as in torch's table."""
    batch, heads, queries, width = query
    return 2 * batch * heads * queries * key[2] * (width + value[3])


def _attention_backward(gradient: Shape, query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """Five products: the scores again, and the gradients of scores, values, queries and keys."""
    batch, heads, queries, width = query
    return 2 * batch * heads * queries * key[2] * (3 * width + 2 * value[3])
