"""Weights of several versions of a policy: the same in the trainer's ranks and in the reference of each version.

With adapters a version is random adapters. Without, it is the checkpoint, or the checkpoint with each entry off by
`NOISE` of itself. An engine that computes with something that it derived from the weights of another version, and kept,
is then off by more than rounding.

In bfloat16 an old copy has to change more than rounding does. Of SmolLM2-135M, with 30 layers, old output projections
of attention shift a log-probability by 0.02 at a noise of 1 % and by 0.1 at 5 %, rounding by 0.04 at both and by 0.17
at 10 %. Of a random Qwen3.5 of 24 layers old convolutions shift it by 0.4 at 5 %, rounding by 0.05.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from app.model.load import reload
from app.model.lora.layer import randomize, seeded
from app.model.lora.names import adapter_tensors
from app.model.policy import PolicyModel, named_checkpoint_tensors
from app.model.sharding import local_shard, own_rows

NOISE = 0.05


class Versions:
    """An extension of a trainer rank that sets the weights of a version."""

    def __init__(self, trainer_rank: Any):
        self.rank = trainer_rank

    def set(self, seed: int | None) -> None:
        """Set the weights of a seed; None: those of the checkpoint."""
        spec = self.rank.spec
        if not spec.lora.enabled:
            reload(self.rank.model, spec.model_path)
        if seed is not None:
            set_weights(self.rank.model, seed, getattr(torch, spec.dtype.name))


def set_weights(policy: PolicyModel, seed: int, dtype: torch.dtype) -> None:
    """Set random adapters; without adapters, add noise to the checkpoint's weights and round them to `dtype`."""
    if any(adapter_tensors(policy)):
        randomize(policy.causal_lm, seed)
        return
    for name, parameter in named_checkpoint_tensors(policy):
        _add_noise(parameter, seeded(f"{seed}/{name}"), dtype)


@torch.no_grad()
def _add_noise(parameter: Tensor, generator: torch.Generator, dtype: torch.dtype) -> None:
    """Multiply each entry by 1 ± `NOISE`: by the product of random signs of its row and of its place in the row."""
    shape = parameter.shape
    rows, places = (torch.randint(0, 2, part, generator=generator) * 2.0 - 1 for part in (shape[:1], shape[1:]))
    own = rows[own_rows(parameter)] if isinstance(parameter, DTensor) else rows

    shard = local_shard(parameter)
    shard.mul_(1 + NOISE * own.view(-1, *[1] * places.dim()).to(shard) * places.to(shard))
    shard.copy_(shard.to(dtype))  # as the engine has them: its rounding of the noise is not an error of the engine
