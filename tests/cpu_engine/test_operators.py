"""The operators that replace SGLang's on a CPU compute the plain formulas; what is not plain stays SGLang's."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from app.cpu_engine import operators
from app.cpu_engine.kv_cache import attend

TOKENS, WIDTH, HEADS, KEY_HEADS = 7, 32, 4, 2
EPSILON = 1e-6
ROUNDING = 1e-6  # of float32, relative


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def norm(width: int, **changed: Any) -> SimpleNamespace:
    """A stand-in for SGLang's RMSNorm; its own path returns "SGLang's"."""
    plain = {
        "weight": torch.randn(width),
        "hidden_size": width,
        "variance_epsilon": EPSILON,
        "variance_size_override": None,
        "cast_x_before_out_mul": False,
        "override_orig_dtype": None,
        "forward_native": lambda *_: "SGLang's",
    }
    return SimpleNamespace(**{**plain, **changed})


def rotary(**changed: Any) -> SimpleNamespace:
    angles = torch.arange(50)[:, None] / 10 ** torch.linspace(0, 3, WIDTH // 2)
    plain = {
        "cos_sin_cache": torch.cat((angles.cos(), angles.sin()), dim=-1),
        "head_size": WIDTH,
        "rotary_dim": WIDTH,
        "is_neox_style": True,
        "forward_native": lambda *_: "SGLang's",
    }
    return SimpleNamespace(**{**plain, **changed})


def exact_norm(x: Tensor, weight: Tensor) -> Tensor:
    x, weight = x.double(), weight.double()
    return x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight


def exact_rotation(x: Tensor, layer: SimpleNamespace, positions: Tensor) -> Tensor:
    """Each pair of a head's halves as a complex number, turned by the angle of its position."""
    first, second = x.double().view(len(x), -1, 2, WIDTH // 2).unbind(2)
    cos, sin = layer.cos_sin_cache[positions].double().unsqueeze(1).chunk(2, -1)
    turned = torch.complex(first, second) * torch.complex(cos, sin)
    return torch.cat((turned.real, turned.imag), dim=-1).flatten(1)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=10 * ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("additions", [0, 1, 2])
def test_a_norm_adds_the_residual_and_normalizes(additions: int) -> None:
    layer = norm(256)
    x, *rest = torch.randn(1 + additions, TOKENS, 256)
    result: Any = operators.rms_norm(layer, x, *rest)
    total = x.double() + sum(each.double() for each in rest)
    normed, stream = result if additions else (result, x)
    close(normed, exact_norm(total, layer.weight))
    close(stream, total)


def test_a_rotation_turns_queries_and_keys_by_their_positions() -> None:
    layer, positions = rotary(), torch.randint(50, (TOKENS,))
    query, key = torch.randn(TOKENS, HEADS * WIDTH), torch.randn(TOKENS, KEY_HEADS * WIDTH)
    turned_query, turned_key = operators.rotary_embedding(layer, positions, query, key)
    close(turned_query, exact_rotation(query, layer, positions))
    close(turned_key, exact_rotation(key, layer, positions))


def test_what_is_not_plain_stays_sglangs() -> None:
    x, half = torch.randn(TOKENS, 256), torch.randn(TOKENS, 256, dtype=torch.bfloat16)
    assert operators.rms_norm(norm(256), half) == "SGLang's"
    assert operators.rms_norm(norm(256), x, half) == "SGLang's"
    assert operators.gemma_rms_norm(norm(256), half) == "SGLang's"
    for changed in ({"variance_size_override": 64}, {"cast_x_before_out_mul": True}, {"weight": half[0]}):
        assert operators.rms_norm(norm(256, **changed), x) == "SGLang's"
    for changed in ({"rotary_dim": WIDTH // 2}, {"is_neox_style": False}, {"cos_sin_cache": half}):
        assert operators.rotary_embedding(rotary(**changed), torch.arange(TOKENS), x, x) == "SGLang's"
    assert operators.rotary_embedding(rotary(), torch.arange(TOKENS), x, x, torch.ones(TOKENS)) == "SGLang's"


def test_attention_over_a_padded_copy_is_that_over_each_requests_own_tokens() -> None:
    lengths, columns = torch.tensor([3, 9, 1]), 12
    keys = torch.randn(4, KEY_HEADS * WIDTH, columns)
    values = torch.randn(4, KEY_HEADS, columns, 16)
    bias = torch.zeros(3, 1, 9).masked_fill_(torch.arange(9) >= lengths[:, None, None], -torch.inf)
    q = torch.randn(3, HEADS * WIDTH)
    mixed = attend(q, keys, values, bias, scale=0.3).view(3, HEADS, 16)

    for request, length in enumerate(lengths.tolist()):
        for head in range(HEADS):
            key_head = head * KEY_HEADS // HEADS
            query = q.view(3, HEADS, WIDTH)[request, head].double()
            key = keys.view(4, KEY_HEADS, WIDTH, columns)[request, key_head, :, :length].double()
            weights = (0.3 * (query @ key)).softmax(-1)
            close(mixed[request, head], weights @ values[request, key_head, :length].double())


def test_a_method_that_sglang_lacks_or_calls_differently_is_not_replaced() -> None:
    assert operators.callable_alike("torch.nn.RMSNorm.forward", lambda layer, x: x)
    assert operators.callable_alike("torch.nn.RMSNorm.forward", lambda original, layer, x: x, before=1)
    assert not operators.callable_alike("torch.nn.RMSNorm.forward", lambda layer, x, residual: x)
    assert not operators.callable_alike("torch.nn.NoSuchNorm.forward", lambda layer, x: x)
    assert not operators.callable_alike("torch.no_such_module.RMSNorm.forward", lambda layer, x: x)
