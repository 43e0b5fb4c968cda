"""Why engines get adapters and not merged weights: bfloat16 loses small changes of a weight."""

import torch
from torch import Tensor, nn

from app.model.lora.layer import LoraLinear
from app.model.lora.names import delta

WIDTH, RANK = 256, 32


def wide_layer(b_std: float) -> LoraLinear:
    """A layer of bfloat16 with weights of a model's size, whose B has this standard deviation."""
    generator = torch.Generator().manual_seed(0)
    adapted = LoraLinear(nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16), RANK, 1.0)
    with torch.no_grad():
        adapted.weight.copy_(0.02 * torch.randn(WIDTH, WIDTH, generator=generator))
        adapted.lora_A.uniform_(-(WIDTH**-0.5), WIDTH**-0.5, generator=generator)
        adapted.lora_B.copy_(b_std * torch.randn(WIDTH, RANK, generator=generator))
    return adapted


def mismatches(b_std: float) -> tuple[float, float]:
    """Return the errors of a merged and of a served adapter, relative to what the adapter changes.

    Both are compared with the trainer's policy in exact arithmetic: bfloat16 base, float32 adapter.
    """
    adapted = wide_layer(b_std)
    x = torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
    added = delta(adapted.lora_A, adapted.lora_B, 1.0)
    merged = (adapted.weight.float() + added).bfloat16()
    with torch.no_grad():
        # In float64 from here: only how the weights are represented differs.
        change = x.double() @ added.double().T
        by_merging = x.double() @ (merged.double() - adapted.weight.double()).T
        a, b = adapted.lora_A.bfloat16().double(), adapted.lora_B.bfloat16().double()
        by_serving = x.double() @ a.T @ b.T
    return error(by_merging, change), error(by_serving, change)


def error(ours: Tensor, exact: Tensor) -> float:
    return ((ours - exact).norm() / exact.norm()).item()


def test_a_merged_weight_of_bfloat16_misses_most_of_a_small_change_that_a_served_adapter_has() -> None:
    merged, served = mismatches(b_std=1e-4)
    assert merged > 0.7
    assert served < 0.01
    merged, served = mismatches(b_std=1e-2)
    assert merged < 0.1
    assert served < 0.01


def test_outputs_of_a_served_adapter_in_bfloat16_are_nearer_to_the_policy_than_those_of_a_merged_weight() -> None:
    """With every rounding of a forward in bfloat16: the trainer computes as the served form does, bit for bit."""
    adapted = wide_layer(b_std=1e-3)
    x = torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
    added = delta(adapted.lora_A, adapted.lora_B, 1.0)
    with torch.no_grad():
        served = nn.functional.linear(x, adapted.weight) + nn.functional.linear(
            nn.functional.linear(x, adapted.lora_A.bfloat16()), adapted.lora_B.bfloat16()
        )
        merged = nn.functional.linear(x, (adapted.weight.float() + added).bfloat16())
        trainer = adapted(x)
    assert torch.equal(trainer, served)
    assert error(merged.double(), trainer.double()) > 1e-3
