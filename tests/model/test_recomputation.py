"""Recomputation changes what a backward pass computes, and no gradient. What is kept is not computed again."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from app.config.trainer import Checkpointing
from app.model.kernels import CPU_KERNELS
from app.model.load import load
from tests.model.support import Operators, batch, save_qwen3, save_qwen35, weights
from tests.trainer.ranks import run_on
from tests.trainer.support import full

DECIDED = [each for each in Checkpointing if each is not Checkpointing.auto]
SAVE = {"qwen3": save_qwen3, "qwen35": partial(save_qwen35, layers=4)}


def gradients(path: Path, mesh: DeviceMesh | None, **options: Any) -> dict[str, torch.Tensor]:
    torch._dynamo.reset()
    policy = load(path, mesh=mesh, device="cpu", **options)
    packed = batch(101)
    logprobs, _ = policy(**packed.inputs, temperature=0.7)
    (logprobs * weights(packed)).sum().backward()
    return {name: full(parameter.grad) for name, parameter in policy.named_parameters()}


def by_recomputation(mesh: DeviceMesh, path: Path, compiled: bool) -> list[dict[str, torch.Tensor]]:
    # Compiled graphs of float64 are not the default on any device, and torch's own of float32 must be equal as well.
    dtype = torch.float32 if compiled else torch.float64
    options = {"param_dtype": dtype, "compute_dtype": dtype, "kernels": replace(CPU_KERNELS, compiled=compiled)}
    return [gradients(path, mesh, activation_checkpointing=each, **options) for each in DECIDED]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])
@pytest.mark.parametrize("save", SAVE.values(), ids=SAVE)
def test_gradients_are_the_same_bit_for_bit_on_two_ranks(
    save: Callable[..., Path], compiled: bool, tmp_path: Path
) -> None:
    path = save(tmp_path / "policy")
    kept, *recomputed = run_on(2, by_recomputation, tmp_path / "results.pt", path, compiled)
    assert len(recomputed) == 3
    for found in recomputed:
        assert all(torch.equal(found[name], expected) for name, expected in kept.items())


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])
def test_what_a_layer_keeps_is_not_computed_again(compiled: bool, tmp_path: Path) -> None:
    """A layer of Qwen3 has seven products, of which a backward pass needs six again, and one attention."""
    torch._dynamo.reset()
    path = save_qwen3(tmp_path)
    products, attentions = {}, {}
    for each in DECIDED:
        kernels = replace(CPU_KERNELS, compiled=compiled)
        policy = load(path, mesh=None, device="cpu", activation_checkpointing=each, kernels=kernels)
        logprobs, _ = policy(**batch(101, (9,)).inputs, temperature=1.0)
        with Operators() as counter:
            logprobs.sum().backward()
        ran = {name: count for name, count in counter.names.items() if "backward" not in name}
        products[each.name] = sum(ran[name] for name in ran if name.startswith(("aten.mm.", "aten.addmm.")))
        attentions[each.name] = sum(ran[name] for name in ran if "scaled_dot_product" in name)

    layers = len(policy.layers)
    assert products["matmuls"] == products["none"]
    assert products["attention"] == products["all"] == products["none"] + 6 * layers
    assert attentions == {"none": 0, "matmuls": 0, "attention": 0, "all": layers}
