"""The roofline's FLOPs and bytes against the shapes of Qwen3-4B by hand."""

from tests.bench.roofline import forward_cost
from tests.docs.measured import load


def test_a_microbatch_has_the_flops_and_the_collectives_of_its_shapes() -> None:
    layer = 2560 * (4096 + 1024 + 1024) + 4096 * 2560 + 3 * 2560 * 9728  # queries, keys, values, output, MLP
    cost = forward_cost("Qwen3-4B")
    assert (cost.per_token, cost.per_completion_token) == (2 * 36 * layer, 2 * 151_936 * 2560)
    assert cost.per_token_squared == 2 * 36 * 32 * 128  # two products, of which half is masked

    parts = load("roofline")["cases"]["4B, H100"]["parts"]
    assert parts["products"]["compute"] == 3 * 2 * 36 * layer * 10_240
    layers, ends = 36 * (layer + 2 * 2560 + 2 * 128), 151_936 * 2560 + 2560  # with norms
    # Three of four ranks send: in 16 bits layers for two passes and the tied ends once, gradients in 32.
    assert parts["collectives"]["link"] == 3 / 4 * (2 * (2 * layers + ends) + 4 * (layers + ends))
