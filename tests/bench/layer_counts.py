"""Kernels and bytes of a layer, the LM head and a microbatch on GPUs and NPUs, counted at real size without one.

    python -m tests.bench.layer_counts                        # all but fla's on NPUs, which are those of the file
    PYTHONPATH=/tmp/fla python -m tests.bench.layer_counts    # fla's too, see npu_launches.py

The application's policies of Qwen3-4B and Qwen3.5-9B run a layer of each kind on meta tensors: transformers' modules,
one sequence of 8,192 tokens in bfloat16. A kernel is an operator of torch that is no view, a fused operator of
torch_npu, a launch of fla's or a compiled graph; its bytes are those of its inputs and outputs. Copies inside of an
operator are not seen, nor is what FSDP2 does between layers. What is compiled is at least that: torch may make several
kernels of a graph, for sums over tokens for instance. A recomputed layer runs forward twice.

Writes tests/bench/results/layer_counts.json.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.utils._python_dispatch import _disable_current_modes

from app.config.device import DeviceKind
from app.config.trainer import Compile
from app.device import device_of
from app.device.base import LinearKernels
from app.device.torchvision_shim import transformers
from app.model.attention import PACKED, register_packed
from app.model.kernels import chunk_shape, compiled_once, kernels_of
from app.model.lm_head import token_logprobs
from app.model.packing import Packing
from app.model.policy import PolicyModel
from tests.bench.kernel_counts import KernelCounts, bytes_of
from tests.bench.random_model import QWEN3_4B, text_config
from tests.standin.elementwise_double import DOUBLE

TOKENS = 8192
OUT = Path(__file__).parent / "results" / "layer_counts.json"
LINEAR = OUT.with_name("linear_counts.json")  # has fla's launches on GPUs
LOOP, EAGER, FUSED = "torch loop", "eager", "fused"  # linear attention in torch; kernels for it; fused operators, too
COMPILED = "compiled"
MODELS = ("Qwen3-4B", "Qwen3.5-9B")
WAYS = {DeviceKind.npu: (EAGER, FUSED), DeviceKind.cuda: (EAGER, COMPILED)}
HEAD = "head"
PASSES = ("forward", "recomputation", "backward")
NOTHING = {"kernels": 0, "bytes": 0}
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
        model: One of `MODELS`.
        kind: NPUs or GPUs.
        launches: What fla launches there for its two operators.
    """

    def __init__(self, model: str, kind: DeviceKind, launches: Launches) -> None:
        self.model = model
        self.kind = kind
        self.launches = launches
        self.counts = KernelCounts()

    def policy(self, way: str) -> PolicyModel:
        register_packed()
        config, auto = config_of(self.model), transformers()
        with torch.device("meta"):
            causal_lm = auto.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=PACKED)
        kernels = kernels_of(device_of(self.kind), Compile.on if way == COMPILED else Compile.off)
        linear = None if way == LOOP else LinearKernels(self.convolve, self.delta_rule)
        fused = DOUBLE if way == FUSED else None
        return PolicyModel(causal_lm, {}, replace(kernels, attention=self.attend, linear=linear, elementwise=fused))

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Let torch.compile count each graph as one kernel, and what a backward pass needs of it as outputs."""

        def compiler(graph: Any, _: Any) -> Any:
            def run(*inputs: Any) -> Any:
                with _disable_current_modes():
                    outputs = graph(*inputs)
                tensors = {id(each): each for each in (*inputs, *outputs) if isinstance(each, Tensor)}
                self.counts.add("compiled", sum(map(bytes_of, tensors.values())))
                return outputs

            return make_boxed_func(run)

        backend = aot_autograd(
            fw_compiler=compiler,
            bw_compiler=compiler,
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
        )
        # A device's products can be added to a float32 sum if it is a GPU; a meta tensor's can.
        adds = mock.patch("app.model.lm_head.adds_products", return_value=self.kind is DeviceKind.cuda)
        torch._dynamo.reset()
        compiled_once.cache_clear()
        with adds, mock.patch.object(torch, "compile", partial(torch.compile, backend=backend)):
            yield
        compiled_once.cache_clear()

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
        """Kind of layer, or the head → pass → kernels and bytes."""
        found = {}
        with self.counting():
            policy = self.policy(way)
            decoder: Any = policy.causal_lm.get_decoder()
            for layer in decoder.layers:
                kind = "linear attention" if hasattr(layer, "linear_attn") else "full attention"
                if kind not in found:
                    forward, backward = self._layer(decoder, layer)
                    found[kind] = {"forward": forward, "recomputation": forward, "backward": backward}
            forward, backward = self._head(policy)
            found[HEAD] = {"forward": forward, "recomputation": NOTHING, "backward": backward}
        return found

    def _layer(self, decoder: Any, layer: Any) -> list[dict[str, Any]]:
        with mock.patch("app.model.packing.to_device", torch.Tensor.to):
            packing = Packing.of([0, TOKENS], "meta")
            assert len(packing.chunk_indices)  # made here: the first layer would wait for a device to pin memory
        positions = torch.zeros(1, TOKENS, dtype=torch.int64, device="meta")
        hidden = hidden_states(decoder.config.hidden_size)
        options = {
            "position_embeddings": decoder.rotary_emb(hidden, positions),
            "attention_mask": None,
            "position_ids": positions,
            "packing": packing,
            "attention_kernel": self.attend,
        }
        return self._passes(lambda: layer(hidden, **options), [hidden, *layer.parameters()])

    def _head(self, policy: PolicyModel) -> list[dict[str, Any]]:
        weight = policy.causal_lm.lm_head.weight
        hidden = hidden_states(weight.shape[1])
        targets = torch.zeros(TOKENS, dtype=torch.int64, device="meta")
        tokens, columns = chunk_shape(policy.kernels, weight)
        options: dict[str, Any] = {
            "chunk_tokens": tokens,
            "chunk_vocabulary": columns,
            "compiled": policy.kernels.compiled,
        }
        return self._passes(
            lambda: token_logprobs(hidden.squeeze(0), weight, targets, 1.0, **options)[0], [hidden, weight]
        )

    def _passes(self, forward: Callable[[], Tensor], inputs: Sequence[Tensor]) -> list[dict[str, Any]]:
        """What the forward and the backward pass launch."""
        self.counts = first = KernelCounts()
        with first:
            out = forward()
        self.counts = second = KernelCounts()
        with second:
            torch.autograd.grad(out, inputs, torch.empty_like(out))
        return [first.found(), second.found()]


def hidden_states(width: int) -> Tensor:
    return torch.empty(1, TOKENS, width, dtype=torch.bfloat16, device="meta", requires_grad=True)


def config_of(model: str) -> Any:
    """Its shapes, with one layer of each kind."""
    return text_config("qwen3_4b", 1) if model == "Qwen3-4B" else text_config("qwen35_9b", 4)


def parts_of(model: str) -> dict[str, int]:
    """Kind of layer, or the head → how many of them the model has."""
    if model == "Qwen3-4B":
        return {"full attention": QWEN3_4B["num_hidden_layers"], HEAD: 1}
    kinds = [kind.replace("_", " ") for kind in transformers().Qwen3_5TextConfig().layer_types]
    return {**{kind: kinds.count(kind) for kind in sorted(set(kinds))}, HEAD: 1}


def total(parts: Mapping[str, Mapping[str, Any]], counts: Mapping[str, int]) -> dict[str, int]:
    """Kernels and bytes of all layers, the head and all passes of a microbatch."""
    return {
        unit: sum(counts[kind] * passes[name][unit] for kind, passes in parts.items() for name in PASSES)
        for unit in ("kernels", "bytes")
    }


def fla_launches(kind: DeviceKind) -> Launches:
    """Of the installed fla-core on NPUs, else those of the file; on GPUs those that `linear_counts` has found."""
    if kind is DeviceKind.cuda:
        both = json.loads(LINEAR.read_text())["layer"]["cuda"]["one sequence"]
        return {"convolution": dict.fromkeys(both, NOTHING), "delta rule": both}  # counted together
    if find_spec("fla") is None:
        return json.loads(OUT.read_text())["npu"]["fla"]
    command = [sys.executable, "-m", "tests.bench.npu_launches"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    return json.loads(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def count_all(kind: DeviceKind, launches: Launches) -> dict[str, Any]:
    models = {}
    for model in MODELS:
        ways = (LOOP, *WAYS[kind]) if model == "Qwen3.5-9B" else WAYS[kind]
        parts = {way: Layers(model, kind, launches).count(way) for way in ways}
        numbers = parts_of(model)
        microbatch = {way: total(parts[way], numbers) for way in ways}
        models[model] = {"parts": numbers, "counts": parts, "microbatch": microbatch}
    return models


def main() -> None:
    found: dict[str, Any] = {"tokens": TOKENS}
    for kind in WAYS:
        launches = fla_launches(kind)
        found[kind.value] = {"models": count_all(kind, launches), "fla": launches}
        for model, counts in found[kind.value]["models"].items():
            for way, sums in counts["microbatch"].items():
                line = f"{kind.value}, {model}, {way}: {sums['kernels']:,} kernels, {sums['bytes'] / 1e12:.2f} TB\n"
                sys.stdout.write(line)
    OUT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
