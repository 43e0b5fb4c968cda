"""Kernels and bytes of a layer and of the head on GPUs and NPUs, counted again on meta tensors."""

import json
from typing import Any

import pytest
import torch

from app.config.device import DeviceKind
from app.config.trainer import Compile
from app.device import device_of
from app.device.torchvision_shim import transformers
from app.model.attention import PACKED, register_packed
from app.model.kernels import kernels_of
from app.model.packing import Packing
from app.model.policy import PolicyModel
from tests.bench.layer_counts import COMPILED, EAGER, HEAD, MODELS, OUT, WAYS, Layers, config_of

RECORDED = json.loads(OUT.read_text())


def recorded(kind: DeviceKind, model: str, way: str) -> Any:
    return RECORDED[kind.value]["models"][model]["counts"][way]


@pytest.mark.parametrize(("kind", "way"), [(kind, way) for kind, ways in WAYS.items() for way in ways])
@pytest.mark.parametrize("model", MODELS)
def test_a_layer_has_no_more_kernels_and_bytes_than_recorded(model: str, kind: DeviceKind, way: str) -> None:
    """More would cost a step; fewer are due in the file, which `python -m tests.bench.layer_counts` writes."""
    found = Layers(model, kind, RECORDED[kind.value]["fla"]).count(way)
    assert found.keys() == recorded(kind, model, way).keys()
    for part, passes in found.items():
        for name, counts in passes.items():
            known = recorded(kind, model, way)[part][name]
            assert counts["kernels"] <= known["kernels"], (part, name, counts, known)
            assert counts["bytes"] <= known["bytes"], (part, name, counts, known)


@pytest.mark.parametrize(
    ("model", "part", "graphs"),
    [
        # Two norms, the MLP's gate, and queries and keys with their norms and rotary embeddings.
        ("Qwen3-4B", "full attention", 4),
        ("Qwen3.5-9B", "full attention", 5),  # and the output gate
        ("Qwen3.5-9B", "linear attention", 4),  # three norms, one of them gated, and the MLP's gate
    ],
)
def test_what_is_compiled_is_one_graph_each_way(model: str, part: str, graphs: int) -> None:
    passes = recorded(DeviceKind.cuda, model, COMPILED)[part]
    assert [passes[name]["names"]["compiled"] for name in ("forward", "backward")] == [graphs, graphs]


@pytest.mark.parametrize("model", MODELS)
def test_the_gradient_of_a_compiled_head_is_read_and_written_once_for_each_chunk(model: str) -> None:
    """Eager, each of four times as many chunks makes a product of its size, too."""
    head = recorded(DeviceKind.cuda, model, COMPILED)[HEAD]["backward"]
    chunks = head["names"]["addmm"]
    assert head["names"]["mm"] == head["names"]["compiled"] == chunks == {"Qwen3-4B": 3, "Qwen3.5-9B": 4}[model]
    assert head["bytes"] < recorded(DeviceKind.cuda, model, EAGER)[HEAD]["backward"]["bytes"] / 3


@pytest.mark.cuda
def test_a_compiled_layer_on_a_device_launches_half_the_kernels_of_an_eager_one() -> None:
    """Graphs have more kernels than one; attention and products have one or two each."""
    auto, launched = transformers(), []
    register_packed()
    for setting in (Compile.off, Compile.on):
        torch.manual_seed(0)
        with torch.device("cuda"):
            config = config_of("Qwen3-4B")
            causal_lm = auto.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=PACKED)
            policy = PolicyModel(causal_lm, {}, kernels_of(device_of(DeviceKind.cuda), setting))
            decoder: Any = policy.causal_lm.get_decoder()
            hidden = torch.randn(1, 1024, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
            angles = decoder.rotary_emb(hidden, torch.arange(1024)[None])
        packing = Packing.of([0, 700, 1024], "cuda")
        for _ in range(3):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                out = decoder.layers[0](hidden, position_embeddings=angles, attention_mask=None, packing=packing)
                out.sum().backward()
                torch.cuda.synchronize()
        launched.append(sum(each.count for each in profile.key_averages() if each.device_type.name == "CUDA"))
    assert launched[1] < launched[0] / 2, launched
