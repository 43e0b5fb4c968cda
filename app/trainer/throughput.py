"""Training speed of a step: seconds by phase, tokens per second, model FLOPs utilization (MFU).

MFU as in PaLM (arXiv 2204.02311, appendix B): the FLOPs that a step needs over what the devices could have computed in
the same time. It needs forward and backward of the policy, and one forward each for π_old and for the reference, where
the algorithm uses them. Recomputation (activation checkpointing, chunks of the head) adds time but no FLOPs. A prompt
that sequences of one microbatch share is counted once, as it is computed. The recurrence of linear attention is not
counted.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from app.model.lora.layer import is_adapter
from app.model.policy import LINEAR_ATTENTION, PolicyModel
from app.utils.phase_timer import PhaseTimer

FORWARD_AND_BACKWARD = 3  # products of a trained matrix: one in the forward, two in the backward


class EventTimer(PhaseTimer):
    """Measures phases on an accelerator by device events, since kernels run asynchronously."""

    def __init__(self, device: torch.device):
        super().__init__()
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._events: list[tuple[str, Any, Any]] = []  # phase, start, end

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start, end = (self._module.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield
        end.record()
        self._events.append((name, start, end))

    def seconds(self) -> Mapping[str, float]:
        """Return the total seconds of each phase so far. Synchronizes the device."""
        self._module.synchronize(self._device)
        for name, start, end in self._events:
            self.add(name, start.elapsed_time(end) / 1000)
        self._events.clear()
        return super().seconds()


@dataclass(frozen=True, slots=True)
class Cost:
    """FLOPs of a pass."""

    per_token: float  # matrices of all layers
    per_completion_token: float  # the head
    per_token_squared: float  # causal attention of all full-attention layers

    def of(self, lengths: Sequence[int], completion_tokens: int) -> float:
        """Return the FLOPs of sequences with these lengths."""
        linear = self.per_token * sum(lengths) + self.per_completion_token * completion_tokens
        return linear + self.per_token_squared * sum(tokens * tokens for tokens in lengths)

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.per_token + other.per_token,
            self.per_completion_token + other.per_completion_token,
            self.per_token_squared + other.per_token_squared,
        )


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """FLOPs of a policy.

    A product of the forward has two in the backward: the gradient of its input, and that of its matrix. A frozen matrix
    needs the former alone. (The input of the first layer needs none under adapters; that is counted all the same.)
    """

    forward: Cost
    step: Cost  # forward and backward

    @classmethod
    def of(cls, model: PolicyModel, *, adapters: bool = True) -> "ModelFlops":
        """Count the products of a policy, or with `adapters=False` of its base model alone."""
        named = model.layers.named_parameters()
        matrices = [each for name, each in named if each.dim() == 2 and (adapters or not is_adapter(name))]
        head = model.causal_lm.lm_head.weight

        config = model.config
        layer_types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        full_layers = sum(layer_type != LINEAR_ATTENTION for layer_type in layer_types)
        # Two products of T × T / 2 × width.
        heads, _, width = model.heads
        attention = 2.0 * full_layers * heads * width

        forward = Cost(2.0 * sum(each.numel() for each in matrices), 2.0 * head.numel(), attention)
        both = Cost(
            2.0 * sum(each.numel() * _products(each) for each in matrices),
            2.0 * head.numel() * _products(head),
            FORWARD_AND_BACKWARD * attention,
        )
        return cls(forward, both)


def _products(matrix: Tensor) -> int:
    """Products of a matrix in forward and backward."""
    return FORWARD_AND_BACKWARD if matrix.requires_grad else FORWARD_AND_BACKWARD - 1


def throughput_metrics(
    seconds: Mapping[str, float], *, tokens: float, flops: float, ranks: int, peak_flops: float | None
) -> dict[str, float]:
    """Return seconds by phase, tokens per second and MFU, from the tokens and FLOPs of all ranks.

    Args:
        peak_flops: Peak FLOP/s of one device. None, if unknown, leaves out `trainer/mfu`.
    """
    total = sum(seconds.values())
    metrics = {f"time/{phase}": value for phase, value in seconds.items()}
    metrics["trainer/tokens_per_second"] = tokens / total if total > 0 else 0.0
    if peak_flops is not None and total > 0:
        metrics["trainer/mfu"] = flops / (total * ranks * peak_flops)
    return metrics
