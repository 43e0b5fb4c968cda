"""The forward of an adapted layer, alone and in a model."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from app.config.model import LoraConfig
from app.model.load import load
from app.model.lora.layer import LoraLinear, adapters_off
from app.model.policy import PolicyModel
from tests.model.lora.support import move
from tests.model.support import batch, save_qwen3, save_qwen35


def layer(dtype: torch.dtype = torch.float32, *, scale: float = 0.7) -> LoraLinear:
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(24, 40, dtype=dtype)
    adapted = LoraLinear(linear, 3, scale)
    with torch.no_grad():
        for parameter in adapted.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return adapted


def test_in_bfloat16_base_and_product_are_rounded_and_then_their_sum() -> None:
    adapted = layer(torch.bfloat16, scale=0.5)
    x = torch.randn(7, 24, generator=torch.Generator().manual_seed(1)).bfloat16()
    base = nn.functional.linear(x, adapted.weight, adapted.bias)
    low = nn.functional.linear(x, adapted.lora_A.bfloat16())
    product = nn.functional.linear(low, adapted.lora_B.bfloat16())
    expected = (base.float() + 0.5 * product.float()).bfloat16()
    assert adapted(x).dtype == torch.bfloat16
    assert torch.equal(adapted(x), expected)


def test_adapters_are_off_inside_the_block_only_also_when_blocks_nest_or_fail() -> None:
    model = nn.Sequential(layer(), nn.Linear(40, 24), layer())
    x = torch.ones(24)
    on = model(x)
    with adapters_off(model):
        off = model(x)
        with adapters_off(model[2]):
            assert torch.equal(model(x), off)
        assert torch.equal(model(x), off)
    assert torch.equal(model(x), on)
    assert not torch.equal(on, off)
    with pytest.raises(KeyError), adapters_off(model):
        raise KeyError
    assert torch.equal(model(x), on)


def logprobs(policy: PolicyModel) -> torch.Tensor:
    with torch.no_grad():
        return policy(**batch(101).inputs, temperature=0.7)[0]


@pytest.mark.parametrize("save", [save_qwen3, save_qwen35])
def test_a_policy_starts_as_its_base_bit_for_bit_and_is_it_again_with_adapters_off(
    save: Callable[[Path], Path], tmp_path: Path
) -> None:
    path = save(tmp_path / "model")
    policy = load(path, mesh=None, device="cpu", lora=LoraConfig(rank=4))
    expected = logprobs(load(path, mesh=None, device="cpu"))
    assert torch.equal(logprobs(policy), expected)
    move(policy)
    assert (logprobs(policy) - expected).abs().max() > 0.1
    with adapters_off(policy):
        assert torch.equal(logprobs(policy), expected)
