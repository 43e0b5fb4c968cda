"""With fused operators (doubles by definition) a policy computes what transformers' modules do."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from app.config.model import LoraConfig
from app.config.trainer import Checkpointing
from app.model.kernels import Kernels
from app.model.load import load
from app.model.policy import PolicyModel
from tests.model.lora.support import move
from tests.model.support import SAVE, Operators, batch, relative, save_kind, save_qwen3, save_qwen35, weights
from tests.standin.elementwise_double import DOUBLE, SCHEMAS

FUSED = Kernels(elementwise=DOUBLE)
PARTS = ("Attention", "MLP", "RMSNorm", "RMSNormGated")


def gradients(policy: PolicyModel) -> dict[str, Tensor]:
    packed = batch(101)
    logprobs, _ = policy(**packed.inputs, temperature=0.7)
    (logprobs * weights(packed)).sum().backward()
    named = {name: parameter.grad for name, parameter in policy.named_parameters() if parameter.grad is not None}
    return {"logprobs": logprobs.detach(), **named}


@pytest.mark.parametrize("rank", [0, 4], ids=["full", "adapters"])
@pytest.mark.parametrize(
    ("family", "save"),
    [
        ("Qwen3", partial(save_qwen3, spread=0.02)),  # wider weights amplify rounding
        ("Qwen3_5", partial(save_qwen35, spread=0.02)),
        ("Qwen2", partial(save_kind, "Qwen2", initializer_range=0.02)),
        ("Llama", partial(save_kind, "Llama", initializer_range=0.02)),
    ],
)
def test_a_fused_policy_equals_the_policy(family: str, save: Callable[[Path], Path], rank: int, tmp_path: Path) -> None:
    """With random norms, adapters on every projection, those of the MLPs included, and recomputed layers."""
    path = save(tmp_path)
    parts = {f"{family}{part}" for part in PARTS if part != "RMSNormGated" or family == "Qwen3_5"}
    options: dict[str, Any] = {"mesh": None, "device": "cpu", "activation_checkpointing": Checkpointing.all}
    found = []
    for kernels in (FUSED, Kernels()):
        policy = load(path, kernels=kernels, lora=LoraConfig(rank=rank), **options)
        move(policy, std=0.02)
        assert replaced(policy) == (parts if kernels is FUSED else set())
        torch.manual_seed(0)
        for name, parameter in policy.named_parameters():
            if parameter.dim() == 1 and "norm" in name:
                parameter.data += 0.2 * torch.randn(parameter.shape)
        with Operators() as called:
            found.append(gradients(policy))
        operators = {name.split(".")[1] for name in called.names if name.startswith("npu.")}
        assert operators == (set(SCHEMAS) if kernels is FUSED else set())
    ours, theirs = found

    assert ours.keys() == theirs.keys()
    assert any("mlp" in name and "lora" in name for name in ours) == (rank > 0)
    assert relative(ours.pop("logprobs"), theirs.pop("logprobs")) < 1e-6
    differences = torch.stack([(ours[name] - expected).norm() for name, expected in theirs.items()])
    norms = torch.stack([expected.norm() for expected in theirs.values()])
    assert differences.norm() < 1e-6 * norms.norm()
    # Sums that nearly cancel, as those of decays, keep fewer digits.
    assert (differences < 1e-4 * norms).all()


def test_fused_operators_launch_fewer_kernels_in_a_layer_with_full_attention(tmp_path: Path) -> None:
    path, launched = save_qwen3(tmp_path), []
    for kernels in (Kernels(), FUSED):
        policy = load(path, mesh=None, device="cpu", kernels=kernels)
        with Operators() as called, torch.no_grad():
            policy.layers[0].register_forward_pre_hook(lambda *_, called=called: called.names.clear())
            policy.layers[0].register_forward_hook(lambda *_, called=called: launched.append(called.names.total()))
            policy(**batch(101).inputs, temperature=1.0)
    before, after = launched
    assert before - after >= 24  # 28 with transformers 5.19


def replaced(model: nn.Module) -> set[str]:
    return {
        type(module).__name__
        for module in model.modules()
        if "forward" in vars(module) and type(module).__name__.endswith(PARTS)
    }


def test_only_a_policy_with_fused_operators_has_them(tmp_path: Path) -> None:
    """A reference in the same process keeps transformers' modules, rotary embedding included."""
    path = SAVE["qwen35"](tmp_path)
    reference = load(path, mesh=None, device="cpu")
    before = gradients(reference)["logprobs"]
    fused = load(path, mesh=None, device="cpu", kernels=FUSED)
    expected = {f"Qwen3_5{part}" for part in PARTS}
    assert (replaced(reference), replaced(fused)) == (set(), expected)
    assert torch.equal(gradients(reference)["logprobs"], before)


@pytest.mark.parametrize(
    ("family", "settings", "fused"),
    [
        ("Mistral", {}, set()),
        ("Phi3", {}, set()),
        ("Llama", {"hidden_act": "gelu"}, {"LlamaRMSNorm", "LlamaAttention"}),
    ],
)
def test_modules_of_other_families_and_activations_stay(
    family: str, settings: dict[str, str], fused: set[str], tmp_path: Path
) -> None:
    policy = load(save_kind(family, tmp_path, **settings), mesh=None, device="cpu", kernels=FUSED)
    assert replaced(policy) == fused
