"""Kernels and bytes of a layer on NPUs, counted again on meta tensors."""

import json
from typing import Any

import pytest

from tests.bench.npu_counts import EAGER, FUSED, LOOP, MODELS, OUT, Layers, total

RECORDED = json.loads(OUT.read_text())


def recorded(model: str, way: str) -> Any:
    return RECORDED["models"][model]["counts"][way]


@pytest.mark.parametrize("way", [EAGER, FUSED])
@pytest.mark.parametrize("model", MODELS)
def test_a_layer_has_no_more_kernels_and_bytes_than_recorded(model: str, way: str) -> None:
    """More would cost a step; fewer are due in the file, which `python -m tests.bench.npu_counts` writes."""
    found = Layers(model, RECORDED["fla"]).count(way)
    assert found.keys() == recorded(model, way).keys()
    for kind, passes in found.items():
        for name, counts in passes.items():
            known = recorded(model, way)[kind][name]
            assert counts["kernels"] <= known["kernels"], (kind, name, counts["names"], known["names"])
            assert counts["bytes"] <= known["bytes"], (kind, name)


def test_fused_operators_launch_a_third_of_the_kernels_of_a_layer_with_full_attention() -> None:
    before, after = (recorded("Qwen3-4B", way)["full attention"] for way in (EAGER, FUSED))
    assert (before["forward"]["kernels"], after["forward"]["kernels"]) == (54, 18)
    assert 3 * after["backward"]["kernels"] <= before["backward"]["kernels"]
    assert after["forward"]["bytes"] < 0.55 * before["forward"]["bytes"]
    assert after["backward"]["bytes"] < 0.4 * before["backward"]["bytes"]


def test_a_microbatch_is_all_layers_forward_twice_and_backward() -> None:
    one = {"forward": {"kernels": 2, "bytes": 10}, "backward": {"kernels": 5, "bytes": 100}}
    layers = {"full attention": {**one, "recomputation": one["forward"]}}
    assert total(layers, {"full attention": 3}) == {"kernels": 27, "bytes": 360}


def test_the_loop_of_linear_attention_launches_more_than_ten_times_the_kernels() -> None:
    sums = RECORDED["models"]["Qwen3.5-9B"]["microbatch"]
    assert sums[LOOP]["kernels"] > 150_000
    assert sums[LOOP]["kernels"] > 10 * sums[EAGER]["kernels"] > 10 * sums[FUSED]["kernels"]
