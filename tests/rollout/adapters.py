"""Hand-made random adapters: as a body of `load_adapter`, and merged into transformers' model."""

import base64
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from app.config.model import LoraConfig
from app.device.cpu import DEVICE
from app.device.torchvision_shim import transformers
from app.rollout.engine.remote import RemoteEngine
from app.types import Completion, GroupRequest
from tests.rollout.support import host_spec, remote, server_spec, transformers_logprobs

LORA = LoraConfig(rank=4, alpha=8.0)
SIZE = 0.3  # standard deviation of the entries of A and B: they move log-probabilities by more than 1
LEFT_OUT = ("in_proj_a", "in_proj_b")  # decays of linear attention, which SGLang cannot adapt


def linear_layers(policy: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers of the decoder that take adapters, each with the prefix of its tensors under PEFT's names."""
    for name, module in policy.named_modules():
        if isinstance(module, nn.Linear) and ".layers." in name and name.rpartition(".")[2] not in LEFT_OUT:
            yield f"base_model.model.{name}", module


def noise(name: str, shape: Sequence[int], seed: int, size: float = SIZE) -> Tensor:
    """The entries of one tensor, by its PEFT name."""
    random = torch.Generator().manual_seed(1000 * seed + sum(map(ord, name)))
    return size * torch.randn(*shape, generator=random)


def random_adapter(policy: nn.Module, seed: int, size: float = SIZE) -> dict[str, Tensor]:
    """A [r, in] and B [out, r] of every layer, by their PEFT names."""
    shapes = {}
    for prefix, layer in linear_layers(policy):
        shapes[f"{prefix}.lora_A.weight"] = (LORA.rank, layer.in_features)
        shapes[f"{prefix}.lora_B.weight"] = (layer.out_features, LORA.rank)
    return {name: noise(name, shape, seed, size) for name, shape in shapes.items()}


def merged(model: Path, seed: int | None, size: float = SIZE) -> Any:
    """Transformers' model with the random adapter of a seed merged into it: W + α/r·B·A; None: without one."""
    policy = transformers().AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if seed is not None:
        adapter = random_adapter(policy, seed, size)
        with torch.no_grad():
            for prefix, layer in linear_layers(policy):
                a, b = adapter[f"{prefix}.lora_A.weight"], adapter[f"{prefix}.lora_B.weight"]
                layer.weight.add_(LORA.alpha / LORA.rank * b @ a)
    return policy


def tensors_of(model: Path, seed: int) -> dict[str, Tensor]:
    """The random adapter of a seed, as SGLang takes it."""
    return random_adapter(merged(model, None), seed)


def body_of(tensors: Mapping[str, Tensor], *, rank: int = LORA.rank) -> dict[str, Any]:
    """The body of `load_adapter`: a plain pickle for the one rank of the engine."""
    return {
        "config_dict": {"peft_type": "LORA", "r": rank, "lora_alpha": LORA.alpha, "target_modules": "all-linear"},
        "serialized_named_tensors": [base64.b64encode(pickle.dumps(dict(tensors))).decode()],
        "load_format": None,
    }


def logprobs_differ(policy: Any, given: GroupRequest, completions: Sequence[Completion]) -> float:
    """The mean difference per token between the log-probabilities of completions and those of transformers' model."""
    differences = [np.abs(each.logprobs - transformers_logprobs(policy, each, given)) for each in completions]
    return float(np.concatenate(differences).mean())


def adapter_engine(model: Path, folder: Path, *, name: str, **flags: object) -> RemoteEngine:
    """An engine that serves adapters, at most 4 at a time; not started."""
    server = server_spec(
        model,
        folder,
        name=name,
        enable_lora=True,
        max_lora_rank=LORA.rank,
        lora_target_modules="all",
        lora_backend=DEVICE.lora_backend,
        lora_strict_loading=True,
        max_loras_per_batch=4,
        max_loaded_loras=4,
        **flags,
    )
    return remote(replace(host_spec(folder, name=name, server=server), serves_adapters=True))
