"""Kernels and bytes of a layer and of a microbatch on NPUs, counted at real size without one.

    python -m tests.bench.npu_counts                                  # all but fla's, which are those of the file
    PYTHONPATH=/tmp/fla python -m tests.bench.npu_counts              # fla's too, see npu_launches.py

The application's policies of Qwen3-4B and Qwen3.5-9B run a layer of each kind on meta tensors: transformers' modules,
one sequence of 8,192 tokens in bfloat16. A kernel is an operator of torch that is no view, a fused operator of
torch_npu or a launch of fla's; its bytes are those of its inputs and outputs. Copies inside of an operator are not
seen, nor is what FSDP2 does between layers. A recomputed layer runs forward twice.

Writes tests/bench/results/npu_counts.json; `python -m tests.docs.measured` renders the page's table from it.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from app.device.base import LinearKernels
from app.device.torchvision_shim import transformers
from app.model.attention import PACKED, register_packed
from app.model.kernels import Kernels
from app.model.packing import Packing
from app.model.policy import PolicyModel
from tests.bench.kernel_counts import KernelCounts, bytes_of
from tests.bench.random_model import QWEN3_4B
from tests.standin.elementwise_double import DOUBLE

TOKENS = 8192
OUT = Path(__file__).parent / "results" / "npu_counts.json"
LOOP, EAGER, FUSED = "torch loop", "eager", "fused"  # linear attention in torch; kernels for it; fused operators, too
MODELS = {"Qwen3-4B": (EAGER, FUSED), "Qwen3.5-9B": (LOOP, EAGER, FUSED)}
PASSES = ("forward", "recomputation", "backward")
Launches = Mapping[str, Mapping[str, Mapping[str, Any]]]  # operator → pass → kernels, bytes


class Counted(torch.autograd.Function):
    """An operator of which only the kernels are known. Its output is as one of its inputs."""

    @staticmethod
    def forward(ctx: Any, add: Any, like: int, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.add = add
        add("forward", inputs)
        return torch.empty_like(inputs[like])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.add("backward", ctx.saved_tensors)
        return None, None, *(torch.empty_like(each) for each in ctx.saved_tensors)


class Layers:
    """The layers of a model, and what they count while they run.

    Args:
        model: A key of `MODELS`.
        launches: What fla launches for its two operators.
    """

    def __init__(self, model: str, launches: Launches) -> None:
        self.model = model
        self.launches = launches
        self.counts = KernelCounts()

    def policy(self, way: str) -> PolicyModel:
        register_packed()
        config, auto = config_of(self.model), transformers()
        with torch.device("meta"):
            causal_lm = auto.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=PACKED)
        linear = None if way == LOOP else LinearKernels(self.convolve, self.delta_rule)
        fused = DOUBLE if way == FUSED else None
        return PolicyModel(causal_lm, {}, Kernels(attention=self.attend, linear=linear, elementwise=fused))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
        def add(part: str, inputs: tuple[Tensor, ...]) -> None:
            # Forward: reads queries, keys and values, writes the output. Backward: the same, their gradients besides.
            size = sum(map(bytes_of, inputs)) + bytes_of(inputs[0])
            self.counts.add(f"attention_{part}", size * (1 if part == "forward" else 2))

        return Counted.apply(add, 0, query, key, value)

    def convolve(self, channels: Tensor, weight: Tensor, *_: Any) -> Tensor:
        return Counted.apply(self._fla("convolution"), 0, channels, weight)

    def delta_rule(self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, *_: Any) -> Tensor:
        return Counted.apply(self._fla("delta rule"), 2, query, key, value, decay, beta)

    def _fla(self, operator: str) -> Any:
        def add(part: str, _: Any) -> None:
            known = self.launches[operator][part]
            self.counts.add(operator, known["bytes"], known["kernels"])

        return add

    def count(self, way: str) -> dict[str, dict[str, Any]]:
        """Kind of layer → pass → kernels and bytes."""
        policy = self.policy(way)
        decoder: Any = policy.causal_lm.get_decoder()
        found = {}
        for layer in decoder.layers:
            kind = "linear attention" if hasattr(layer, "linear_attn") else "full attention"
            if kind not in found:
                found[kind] = self._passes(decoder, layer)
        return found

    def _passes(self, decoder: Any, layer: Any) -> dict[str, Any]:
        with mock.patch("app.model.packing.to_device", torch.Tensor.to):
            packing = Packing.of([0, TOKENS], "meta")
            assert len(packing.chunk_indices)  # made here: the first layer would wait for a device to pin memory
        positions = torch.zeros(1, TOKENS, dtype=torch.int64, device="meta")
        hidden = torch.empty(
            1, TOKENS, decoder.config.hidden_size, dtype=torch.bfloat16, device="meta", requires_grad=True
        )
        options = {
            "position_embeddings": decoder.rotary_emb(hidden, positions),
            "attention_mask": None,
            "position_ids": positions,
            "packing": packing,
            "attention_kernel": self.attend,
        }
        self.counts = forward = KernelCounts()
        with forward:
            out = layer(hidden, **options)
        self.counts = backward = KernelCounts()
        with backward:
            torch.autograd.grad(out, [hidden, *layer.parameters()], torch.empty_like(out))
        return {"forward": forward.found(), "recomputation": forward.found(), "backward": backward.found()}


def config_of(model: str) -> Any:
    """Its shapes, with one layer of each kind."""
    auto = transformers()
    if model == "Qwen3-4B":
        return auto.Qwen3Config(**{**QWEN3_4B, "num_hidden_layers": 1})
    config = auto.Qwen3_5TextConfig()
    config.num_hidden_layers = 4
    config.layer_types = config.layer_types[:4]
    return config


def layers_of(model: str) -> dict[str, int]:
    """Kind of layer → how many of them the model has."""
    if model == "Qwen3-4B":
        return {"full attention": QWEN3_4B["num_hidden_layers"]}
    kinds = [kind.replace("_", " ") for kind in transformers().Qwen3_5TextConfig().layer_types]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def total(layers: Mapping[str, Mapping[str, Any]], counts: Mapping[str, int]) -> dict[str, int]:
    """Kernels and bytes of all layers and passes of a microbatch."""
    return {
        unit: sum(counts[kind] * passes[name][unit] for kind, passes in layers.items() for name in PASSES)
        for unit in ("kernels", "bytes")
    }


def fla_launches() -> Launches:
    """Of the installed fla-core, else those of the file."""
    if find_spec("fla") is None:
        return json.loads(OUT.read_text())["fla"]
    command = [sys.executable, "-m", "tests.bench.npu_launches"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    return json.loads(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def count_all(launches: Launches) -> dict[str, Any]:
    models = {}
    for model, ways in MODELS.items():
        layers = {way: Layers(model, launches).count(way) for way in ways}
        numbers = layers_of(model)
        microbatch = {way: total(layers[way], numbers) for way in ways}
        models[model] = {"layers": numbers, "counts": layers, "microbatch": microbatch}
    return models


def main() -> None:
    launches = fla_launches()
    found: dict[str, Any] = {"tokens": TOKENS, "models": count_all(launches), "fla": launches}
    OUT.write_text(json.dumps(found, indent=1) + "\n")
    for model, counts in found["models"].items():
        for way, sums in counts["microbatch"].items():
            sys.stdout.write(f"{model}, {way}: {sums['kernels']:,} kernels, {sums['bytes'] / 1e12:.2f} TB\n")


if __name__ == "__main__":
    main()
