"""The optimizer of one rank: AdamW or SGD over sharded float32 masters, warm-up, clipping, a guard against NaN."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from app.config import trainer as schema
from app.config.trainer import TrainerConfig
from app.errors import RunError

SLOTS = {schema.Optimizer.adamw: ("step", "exp_avg", "exp_avg_sq"), schema.Optimizer.sgd: ()}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an update did."""

    applied: bool  # False: the gradient was not finite, or there was none; nothing was changed
    grad_norm: float  # before clipping
    lr: float  # the one that was used


class Optimizer:
    """Updates parameters from gradients that were accumulated as raw sums."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], config: TrainerConfig):
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.config = config
        self.torch = _make(self.parameters, config)
        self.updates = 0  # applied ones; the schedule counts them
        self.skipped_in_a_row = 0

    @property
    def slots(self) -> tuple[str, ...]:
        """What it keeps of every parameter that it updated."""
        return SLOTS[self.config.optimizer]

    def update(self, *, scale: float) -> Outcome:
        """Scale the gradients, clip, step. One that is not finite is skipped; too many in a row raise an error."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        lr = self.lr()
        if not gradients:  # a step without trajectories, on every rank
            return Outcome(False, 0.0, lr)
        torch._foreach_mul_(gradients, scale)
        norm = grad_norm(gradients)
        if not torch.isfinite(norm):
            self._skip()
            return Outcome(False, float(norm), lr)
        self.skipped_in_a_row = 0
        limit = self.config.max_grad_norm
        if norm > limit:
            torch._foreach_mul_(gradients, float(limit / norm))
        for group in self.torch.param_groups:
            group["lr"] = lr
        self.torch.step()
        self.zero_grad()
        self.updates += 1
        return Outcome(True, float(norm), lr)

    def lr(self) -> float:
        """The learning rate of the next update."""
        warmup = self.config.warmup_steps
        return self.config.lr * min(1.0, (self.updates + 1) / warmup) if warmup else self.config.lr

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def state(self) -> Iterator[tuple[torch.Tensor, str, torch.Tensor]]:
        """(parameter, slot, value) of every parameter that was updated before."""
        for parameter in self.parameters:
            kept = self.torch.state.get(parameter, {})
            yield from ((parameter, slot, kept[slot]) for slot in self.slots if slot in kept)

    def restore(
        self, kept: Mapping[torch.Tensor, Mapping[str, torch.Tensor]], *, updates: int, skipped_in_a_row: int
    ) -> None:
        """Go on where another optimizer stood: slot → value of each parameter that it had updated."""
        groups = self.torch.param_groups
        order = [parameter for group in groups for parameter in group["params"]]
        state = {place: dict(kept[parameter]) for place, parameter in enumerate(order) if parameter in kept}
        self.torch.load_state_dict({"state": state, "param_groups": self.torch.state_dict()["param_groups"]})
        self.updates, self.skipped_in_a_row = updates, skipped_in_a_row

    def _skip(self) -> None:
        self.zero_grad()
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row > self.config.max_skipped_updates:
            raise RunError(
                f"the gradient was not finite {self.skipped_in_a_row} updates in a row, more than "
                f"trainer.max_skipped_updates={self.config.max_skipped_updates}"
            )


def grad_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The 2-norm over all parameters and all ranks: each rank squares its shards, one number is reduced."""
    local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    squared = torch.stack(torch._foreach_norm(local)).double().square().sum().cpu()
    if any(isinstance(gradient, DTensor) for gradient in gradients):
        dist.all_reduce(squared)
    return squared.sqrt()


def _make(parameters: list[torch.nn.Parameter], config: TrainerConfig) -> torch.optim.Optimizer:
    decayed = [parameter for parameter in parameters if parameter.dim() > 1]
    plain = [parameter for parameter in parameters if parameter.dim() <= 1]  # norms and biases are not decayed
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    if config.optimizer is schema.Optimizer.sgd:
        return torch.optim.SGD(groups, lr=config.lr)
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2))
