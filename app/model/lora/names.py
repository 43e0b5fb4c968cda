"""Names and forms of adapters outside of the trainer: PEFT's, for files, SGLang's, for engines, and merged weights.

in the model    layers.0.self_attn.q_proj: LoraLinear with lora_A, lora_B
PEFT            base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight
SGLang          as PEFT's, but the fused projection of linear attention is spelled in its parts
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from app.config.model import LoraConfig
from app.errors import RunError
from app.model.hf_checkpoint import open_checkpoint, stored_name
from app.model.lora.layer import ADAPTER_PARAMETERS, LoraLinear

PREFIX, SUFFIX = "base_model.model.", ".weight"
QKV = ".in_proj_qkv."  # of linear attention
QKV_PARTS = (".in_proj_q.", ".in_proj_k.", ".in_proj_v.")


def adapter_tensors(policy: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (PEFT's name, parameter) of a policy's adapters in model order; nothing if it has none."""
    for name, module in policy.get_submodule("causal_lm").named_modules():
        if isinstance(module, LoraLinear):
            for parameter in ADAPTER_PARAMETERS:
                yield f"{PREFIX}{name}.{parameter}{SUFFIX}", getattr(module, parameter)


def module_of(name: str) -> tuple[str, str]:
    """Split PEFT's name of a tensor into the name of its layer and `lora_A` or `lora_B`.

    >>> module_of("base_model.model.model.layers.0.mlp.up_proj.lora_A.weight")
    ('model.layers.0.mlp.up_proj', 'lora_A')
    """
    module, _, parameter = name.removeprefix(PREFIX).removesuffix(SUFFIX).rpartition(".")
    return module, parameter


def adapter_config(lora: LoraConfig, names: Iterable[str], base: str | None = None) -> dict[str, Any]:
    """Return PEFT's `adapter_config.json` of tensors with these names on `base`, a directory or hub id."""
    targets = {module_of(name)[0].rpartition(".")[2] for name in names}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(targets),
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def served_config(lora: LoraConfig) -> dict[str, Any]:
    """Return the configuration that SGLang needs to load an adapter: its layers follow from the tensors' names."""
    return {"peft_type": "LORA", "r": lora.rank, "lora_alpha": lora.alpha, "target_modules": "all-linear"}


def served(name: str, tensor: Tensor, model_config: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors that SGLang loads for one of PEFT's, a complete A [r, in] or B [out, r].

    `model_config`, that of the policy, has the widths of linear attention.
    """
    if QKV not in name:
        return [(name, tensor)]

    parts: Iterable[Tensor] = (tensor, tensor, tensor)
    if module_of(name)[1] == "lora_B":
        keys = model_config.linear_num_key_heads * model_config.linear_key_head_dim
        values = model_config.linear_num_value_heads * model_config.linear_value_head_dim
        parts = tensor.split([keys, keys, values])
    return [(name.replace(QKV, part), each) for part, each in zip(QKV_PARTS, parts, strict=True)]


def merged(source: Path, adapters: Mapping[str, Tensor], scale: float) -> Iterator[tuple[str, Tensor]]:
    """Yield (checkpoint name, W + scale · B A) of every adapted weight, in float32 and one at a time.

    Storing them in bfloat16 rounds them once. A change below half a step of bfloat16's grid is lost by that, which is
    why engines get the adapters themselves while a run trains.

    `adapters` has A [r, in] and B [out, r] by PEFT's names. Raises `RunError` if the base has no weight of their name.
    """
    with open_checkpoint(source) as base:
        for layer, (a, b) in pairs(adapters).items():
            name = stored_name(f"{layer}.weight", base.names)
            if name is None:
                raise RunError(f"export: {source} has no tensor named {layer}.weight")
            yield name, base.read(name).to(torch.float32) + delta(a, b, scale)


def delta(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return what an adapter adds to its layer's weight: `scale · B A` [out, in] float32."""
    return scale * (b.to(torch.float32) @ a.to(torch.float32))


def pairs(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return (A, B) of every adapted layer, by the layer's name. `tensors` have PEFT's names."""
    by_layer: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        layer, parameter = module_of(name)
        by_layer.setdefault(layer, {})[parameter] = tensor
    return {layer: (both["lora_A"], both["lora_B"]) for layer, both in by_layer.items()}
