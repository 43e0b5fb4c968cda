"""Layers with adapters: their forward, which there are, what is frozen, first values, the form of SGLang.

The names of PEFT: tests/checkpoint/test_adapters.py.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from app.config.model import LoraConfig
from app.model.load import load
from app.model.lora.layer import LoraLinear, adapters_off
from app.model.lora.names import adapter_tensors, delta, module_of, pairs, served
from app.model.policy import PolicyModel, named_checkpoint_tensors, named_trained_tensors
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


def adapted(path: Path, *targets: str, rank: int = 4, seed: int = 0) -> PolicyModel:
    return load(path, mesh=None, device="cpu", lora=LoraConfig(rank=rank, targets=list(targets or ["all"])), seed=seed)


def layers_of(policy: PolicyModel) -> set[str]:
    """Last names of the adapted layers."""
    return {module_of(name)[0].rpartition(".")[2] for name, _ in adapter_tensors(policy)}


def test_all_linear_layers_of_a_decoder_get_adapters_but_not_its_head_and_decays(tmp_path: Path) -> None:
    policy = adapted(save_qwen3(tmp_path / "model", tied=False))
    attention, mlp = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}
    assert layers_of(policy) == attention | mlp
    shapes = {name: tuple(tensor.shape) for name, tensor in adapter_tensors(policy)}
    assert len(shapes) == 3 * 7 * 2
    assert shapes["base_model.model.model.layers.2.mlp.down_proj.lora_A.weight"] == (4, 48)
    assert shapes["base_model.model.model.layers.2.mlp.down_proj.lora_B.weight"] == (32, 4)
    linear = {"in_proj_qkv", "in_proj_z", "out_proj"}
    assert layers_of(adapted(save_qwen35(tmp_path / "linear"))) == attention | mlp | linear


def test_everything_else_is_frozen_and_only_adapters_are_trained(tmp_path: Path) -> None:
    policy = adapted(save_qwen35(tmp_path / "model"), "q_proj", "up_proj")
    trained = dict(named_trained_tensors(policy))
    assert layers_of(policy) == {"q_proj", "up_proj"}
    assert {id(each) for each in trained.values()} == {id(each) for each in policy.parameters() if each.requires_grad}
    assert {each.dtype for each in trained.values()} == {torch.float32}
    base = dict(named_checkpoint_tensors(policy))
    plain = load(tmp_path / "model", mesh=None, device="cpu")
    assert base.keys() == dict(named_checkpoint_tensors(plain)).keys() == dict(named_trained_tensors(plain)).keys()
    assert all(torch.equal(base[name], tensor) for name, tensor in named_checkpoint_tensors(plain))


def test_first_values_depend_on_seed_and_name_alone(tmp_path: Path) -> None:
    path = save_qwen3(tmp_path / "model")
    torch.manual_seed(1)
    first = dict(named_trained_tensors(adapted(path)))
    torch.manual_seed(2)
    again = dict(named_trained_tensors(adapted(path, "q_proj")))
    other = dict(named_trained_tensors(adapted(path, seed=1)))
    assert len({tuple(each.flatten()[:3].tolist()) for name, each in first.items() if "lora_A" in name}) == 21
    for name, tensor in first.items():
        if "lora_B" in name:
            assert not tensor.any()
            continue
        bound = tensor.shape[1] ** -0.5
        assert 0.9 * bound < tensor.abs().max() <= bound, name
        assert not torch.equal(tensor, other[name]), name
        if name in again:
            assert torch.equal(tensor, again[name]), name


def test_the_parts_of_a_fused_projection_add_the_rows_of_the_whole(tmp_path: Path) -> None:
    """SGLang merges in_proj_q, _k, _v and _z; the checkpoint has in_proj_qkv, of 16 + 16 + 32 rows, and in_proj_z."""
    policy = adapted(save_qwen35(tmp_path / "model"))
    move(policy)
    scale = LoraConfig(rank=4).scale
    trained = dict(named_trained_tensors(policy))
    forms = [form for name, tensor in trained.items() for form in served(name, tensor, policy.config)]
    names = [name for name, _ in forms]
    assert len(names) == len(set(names)) == len(trained) + 3 * 2 * 2  # three layers of linear attention
    whole, parts = pairs(trained), pairs(dict(forms))
    layer = "model.layers.1.linear_attn.in_proj_"
    rows = [delta(*parts[f"{layer}{part}"], scale) for part in "qkv"]
    assert [len(each) for each in rows] == [16, 16, 32]
    assert torch.equal(torch.cat(rows), delta(*whole[f"{layer}qkv"], scale))
    assert torch.equal(parts[f"{layer}z"][1], whole[f"{layer}z"][1])
