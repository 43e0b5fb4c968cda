"""With fused operators (doubles by definition) a policy computes what transformers' modules do."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from app.config.model import LoraConfig
from app.config.trainer import Checkpointing
from app.device.torchvision_shim import transformers
from app.model.kernels import Kernels, fuse_elementwise
from app.model.load import load
from app.model.policy import PolicyModel
from tests.bench.kernel_counts import KernelCounts
from tests.model.lora.support import move
from tests.model.support import SAVE, batch, relative, save_kind, save_qwen3, save_qwen35, weights
from tests.standin.elementwise_double import DOUBLE

FUSED = Kernels(elementwise=DOUBLE)
FAMILIES = {"qwen3": "Qwen3Config", "qwen2": "Qwen2Config", "llama": "LlamaConfig", "qwen3_5": "Qwen3_5TextConfig"}
PARTS = ("Attention", "MLP", "RMSNorm", "RMSNormGated")
OPERATORS = {
    "RMSNorm": ("npu_rms_norm",),
    "RMSNormGated": ("npu_rms_norm", "npu_swiglu"),
    "MLP": ("npu_swiglu",),
    "Attention": ("npu_rotary_mul",),
}


def config_of(family: str) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 8, "num_hidden_layers": 1, "vocab_size": 11}
    if family == "qwen3_5":
        sizes |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2}
        sizes |= {"linear_num_value_heads": 4, "head_dim": 16, "num_hidden_layers": 4}
    return getattr(transformers(), FAMILIES[family])(**sizes)


def decoders(family: str) -> tuple[Any, Any]:
    """A decoder with random weights, norms included, and the same with fused operators."""
    config = config_of(family)
    torch.manual_seed(0)
    model = transformers().AutoModelForCausalLM.from_config(config, attn_implementation="eager").get_decoder()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and "norm" in name:
            nn.init.normal_(parameter, std=0.5)
    fused = copy.deepcopy(model)
    fuse_elementwise(fused, DOUBLE)
    return model, fused


def parts(model: Any, name: str) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__.endswith(name)]


def outcome(module: nn.Module, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """The output, and the gradients of inputs and parameters, for a random gradient of the output."""
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    out = run(module, inputs)
    upstream = torch.randn(out.shape, generator=generator)
    return [out.detach(), *torch.autograd.grad(out, [*inputs, *module.parameters()], upstream)]


SHAPES: dict[str, list[tuple[int, ...]]] = {
    "RMSNorm": [(1, 9, 32)],
    "RMSNormGated": [(36, 8), (36, 8)],
    "MLP": [(1, 9, 32)],
    "Attention": [(1, 9, 32)],
}


def run(module: Any, inputs: list[Tensor]) -> Tensor:
    """Call a part of a decoder; attention with angles of full heads, of Qwen3.5 of their first quarter."""
    if not type(module).__name__.endswith("Attention"):
        return module(*inputs)
    width = 4 if "Qwen3_5" in type(module).__name__ else 8
    angles = torch.randn(1, 9, width // 2, generator=torch.Generator().manual_seed(2)).repeat(1, 1, 2)
    mask = torch.full((9, 9), -torch.inf).triu(1)[None, None]
    return module(*inputs, position_embeddings=(angles.cos(), angles.sin()), attention_mask=mask)[0]


@pytest.mark.parametrize(
    ("family", "part"),
    [(family, part) for family in FAMILIES for part in ("RMSNorm", "MLP", "Attention")] + [("qwen3_5", "RMSNormGated")],
)
def test_a_part_with_fused_operators_equals_the_module(family: str, part: str) -> None:
    """The last such part of a decoder; of norms, that of the hidden states."""
    model, fused = decoders(family)
    theirs, ours = parts(model, part)[-1], parts(fused, part)[-1]
    with KernelCounts() as before:
        expected = outcome(theirs, SHAPES[part])
    with KernelCounts() as after:
        found = outcome(ours, SHAPES[part])
    assert not any(name.startswith("npu_") for name in before.names)
    assert {f"{operator}{suffix}" for operator in OPERATORS[part] for suffix in ("", "_backward")} <= set(after.names)
    for one, other in zip(found, expected, strict=True):
        assert relative(one, other) < 1e-6


def gradients(policy: PolicyModel) -> dict[str, Tensor]:
    packed = batch(101)
    logprobs, _ = policy(**packed.inputs, temperature=0.7)
    (logprobs * weights(packed)).sum().backward()
    named = {name: parameter.grad for name, parameter in policy.named_parameters() if parameter.grad is not None}
    return {"logprobs": logprobs.detach(), **named}


@pytest.mark.parametrize("rank", [0, 4], ids=["full", "adapters"])
@pytest.mark.parametrize("save", [save_qwen3, save_qwen35])
def test_a_fused_policy_equals_the_policy(save: Callable[..., Path], rank: int, tmp_path: Path) -> None:
    """With adapters on every projection, those of the MLPs included, and recomputed layers."""
    path = save(tmp_path, spread=0.02)  # wider weights amplify rounding
    options: dict[str, Any] = {"mesh": None, "device": "cpu", "activation_checkpointing": Checkpointing.all}
    found = []
    for kernels in (FUSED, Kernels()):
        policy = load(path, kernels=kernels, lora=LoraConfig(rank=rank), **options)
        move(policy, std=0.02)
        found.append(gradients(policy))
    ours, theirs = found

    assert ours.keys() == theirs.keys()
    assert any("mlp" in name and "lora" in name for name in ours) == (rank > 0)
    assert relative(ours.pop("logprobs"), theirs.pop("logprobs")) < 1e-6
    differences = torch.stack([(ours[name] - expected).norm() for name, expected in theirs.items()])
    norms = torch.stack([expected.norm() for expected in theirs.values()])
    assert differences.norm() < 1e-6 * norms.norm()
    # Sums that nearly cancel, as those of decays, keep fewer digits.
    assert (differences < 1e-4 * norms).all()


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
