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

from app.device.cpu import DEVICE
from app.model.hf_import import transformers
from app.rollout.remote import RemoteEngine
from app.types import Completion, GroupRequest
from tests.rollout.support import host_spec, remote, server_spec, transformers_logprobs

RANK = 4
ALPHA = 8.0
SIZE = 0.3  # standard deviation of the entries of A and B: they move log-probabilities by more than 1
LEFT_OUT = ("in_proj_a", "in_proj_b", "in_proj_ba")  # decays of linear attention, which SGLang cannot adapt


def load_model(model: Path) -> Any:
    return transformers().AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def linear_layers(policy: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers of the decoder."""
    for name, module in policy.named_modules():
        if isinstance(module, nn.Linear) and ".layers." in name and name.rpartition(".")[2] not in LEFT_OUT:
            yield name, module


def random_adapter(policy: nn.Module, seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """A [r, in] and B [out, r] of every layer, by its name in transformers."""
    random = torch.Generator().manual_seed(seed)
    return {
        name: (
            SIZE * torch.randn(RANK, layer.in_features, generator=random),
            SIZE * torch.randn(layer.out_features, RANK, generator=random),
        )
        for name, layer in linear_layers(policy)
    }


def merged(model: Path, seed: int | None) -> Any:
    """Transformers' model with the random adapter of a seed merged into it; None: without one."""
    policy = load_model(model)
    if seed is not None:
        adapter = random_adapter(policy, seed)
        with torch.no_grad():
            for name, layer in linear_layers(policy):
                a, b = adapter[name]
                layer.weight.add_(ALPHA / RANK * b @ a)
    return policy


def served(policy: Any, name: str, a: Tensor, b: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The matrices of one layer under SGLang's names: it takes apart what Qwen3.5's linear attention fuses."""
    path, _, last = name.rpartition(".")
    if last != "in_proj_qkv":
        yield name, a, b
        return
    config = policy.config
    keys = config.linear_key_head_dim * config.linear_num_key_heads
    for part, rows in zip("qkv", b.split([keys, keys, len(b) - 2 * keys]), strict=True):
        yield f"{path}.in_proj_{part}", a, rows.contiguous()


def tensors_of(model: Path, seed: int) -> dict[str, Tensor]:
    """The random adapter of a seed under PEFT's names, as SGLang takes it."""
    policy = load_model(model)
    tensors: dict[str, Tensor] = {}
    for name, (a, b) in random_adapter(policy, seed).items():
        for path, served_a, served_b in served(policy, name, a, b):
            tensors[f"base_model.model.{path}.lora_A.weight"] = served_a
            tensors[f"base_model.model.{path}.lora_B.weight"] = served_b
    return tensors


def body_of(tensors: Mapping[str, Tensor], *, ranks: int = 1, rank: int = RANK) -> dict[str, Any]:
    """The body of `load_adapter`: a plain pickle for each rank of the engine."""
    return {
        "config_dict": {"peft_type": "LORA", "r": rank, "lora_alpha": ALPHA, "target_modules": "all-linear"},
        "serialized_named_tensors": [base64.b64encode(pickle.dumps(dict(tensors))).decode() for _ in range(ranks)],
        "load_format": None,
    }


def logprobs_differ(policy: Any, given: GroupRequest, completions: Sequence[Completion]) -> float:
    """The mean difference per token between the log-probabilities of completions and those of transformers' model.

    Not the largest one: adapters of this size make the tiny model ill-conditioned. Both sides are up to 4e-5 from
    float64 at single tokens of 1,000, and 2e-6 in the mean.
    """
    differences = [np.abs(each.logprobs - transformers_logprobs(policy, each, given)) for each in completions]
    return float(np.concatenate(differences).mean())


def adapter_engine(
    model: Path,
    folder: Path,
    *,
    name: str,
    most: int = 4,
    environment: Mapping[str, str] | None = None,
    **flags: object,
) -> RemoteEngine:
    """An engine that serves adapters, at most `most` at a time; not started."""
    server = server_spec(
        model,
        folder,
        name=name,
        enable_lora=True,
        max_lora_rank=RANK,
        lora_target_modules="all",
        lora_backend=DEVICE.lora_backend,
        lora_strict_loading=True,
        max_loras_per_batch=most,
        max_loaded_loras=most,
        **flags,
    )
    server = replace(server, environment={**server.environment, **(environment or {})})
    return remote(replace(host_spec(folder, name=name, server=server), serves_adapters=True))
