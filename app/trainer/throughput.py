"""How fast a step trained: seconds of its phases, tokens a second, and the share of the device's peak that they used.

Model FLOPs utilisation as PaLM defines it (arXiv 2204.02311, appendix B): the FLOPs that forward and backward of the
policy need, over what the devices could have done meanwhile. What is computed twice (activation checkpointing, the
head's chunks) or besides (a reference policy) counts as time only. The recurrence of linear attention is not counted.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from app.model.policy import LINEAR_ATTENTION, PolicyModel

FORWARD_AND_BACKWARD = 3  # a backward pass costs two forwards


class PhaseTimer:
    """Sums up seconds by phase: by the device's own clock where it works behind the host's back."""

    def __init__(self, device: torch.device):
        self._device = device
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, Any, Any]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if self._device.type == "cpu":
            began = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - began
            return
        module = torch.get_device_module(self._device)
        began, ended = (module.Event(enable_timing=True) for _ in range(2))
        began.record()
        yield
        ended.record()
        self._events.append((name, began, ended))

    def seconds(self) -> Mapping[str, float]:
        """Of every phase so far; waits for the device."""
        if self._events:
            torch.get_device_module(self._device).synchronize(self._device)
        for name, began, ended in self._events:
            self._seconds[name] += began.elapsed_time(ended) / 1000
        self._events.clear()
        return self._seconds


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """What training on a sequence costs."""

    per_token: float  # matrices of all layers
    per_completion_token: float  # the head
    per_token_squared: float  # causal attention of all full layers

    @classmethod
    def of(cls, model: PolicyModel) -> "ModelFlops":
        config = model.config
        matrices = sum(parameter.numel() for parameter in model.layers.parameters() if parameter.dim() == 2)
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        full = sum(kind != LINEAR_ATTENTION for kind in kinds)
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        width = config.num_attention_heads * size
        return cls(
            per_token=2.0 * FORWARD_AND_BACKWARD * matrices,
            per_completion_token=2.0 * FORWARD_AND_BACKWARD * model.causal_lm.lm_head.weight.numel(),
            per_token_squared=2.0 * FORWARD_AND_BACKWARD * full * width,  # two products of T × T / 2 × width
        )

    def sequence(self, tokens: int, completion_tokens: int) -> float:
        """FLOPs of forward and backward of one sequence."""
        linear = self.per_token * tokens + self.per_completion_token * completion_tokens
        return linear + self.per_token_squared * tokens * tokens


def throughput_metrics(
    seconds: Mapping[str, float], *, tokens: float, flops: float, ranks: int, peak_flops: float | None
) -> dict[str, float]:
    """`tokens` and `flops` of all ranks; `trainer/mfu` only where the peak of a device, in FLOP/s, is known."""
    total = sum(seconds.values())
    found = {f"time/{phase}": value for phase, value in seconds.items()}
    found["trainer/tokens_per_second"] = tokens / total if total > 0 else 0.0
    if peak_flops is not None and total > 0:
        found["trainer/mfu"] = flops / (total * ranks * peak_flops)
    return found
