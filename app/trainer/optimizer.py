"""The optimizer of one rank: AdamW or SGD over sharded float32 parameters, with schedule, clipping and a NaN guard."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import cos, isfinite, nan, pi
from statistics import fmean

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from app.config.trainer import Optimizer, Schedule, TrainerConfig
from app.errors import RunError
from app.model.sharding import local_shard, replicas
from app.trainer.host_state import HostTensors

BETAS = (0.9, 0.98)  # of AdamW
MAX_SKIPPED_UPDATES = 3  # in a row, for gradients that are not finite
SAMPLED_WEIGHTS = 256  # of each tensor's first row on this rank, to measure how far an update moves them
SLOTS = {Optimizer.adamw: ("step", "exp_avg", "exp_avg_sq"), Optimizer.sgd: ()}


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """Outcome of one optimizer update."""

    applied: bool  # False: there was no gradient or it was not finite, and nothing changed
    grad_norm: float  # before clipping
    lr: float  # learning rate of this update
    # Mean |change| of sampled weights of this rank over their mean size, [] on the device; None: not applied.
    change: torch.Tensor | None = None


def update_metrics(results: Sequence[UpdateResult]) -> dict[str, float]:
    """Return the metrics of a step's updates (at least one).

    Gradient norms are the mean and the largest of the updates whose gradient was finite, NaN if there was none. The
    host waits for the last update.
    """
    norms = [result.grad_norm for result in results if isfinite(result.grad_norm)]
    changes = [result.change for result in results if result.change is not None]
    return {
        "grad_norm": fmean(norms) if norms else nan,
        "grad_norm/max": max(norms, default=nan),
        "lr": results[-1].lr,
        "updates/skipped": float(len(results) - len(norms)),
        "updates/relative_change": float(torch.stack(changes).mean()) if changes else nan,
    }


def learning_rate(config: TrainerConfig, update: int, *, run_updates: int) -> float:
    """Return the learning rate of an update.

    The warm-up rises to `trainer.lr` · `trainer.lr_scale` in its last update. The decay starts there in the update
    after that, and would reach its floor one update after the last.

    `update` counts from 0; the run has `run_updates`.
    """
    warmup = config.warmup_steps
    if update < warmup:
        return config.peak_lr * (update + 1) / warmup
    if config.schedule is Schedule.constant:
        return config.peak_lr

    progress = min(1.0, (update - warmup) / max(1, run_updates - warmup))
    remaining = 1 - progress
    if config.schedule is Schedule.cosine:
        remaining = (1 + cos(pi * progress)) / 2
    return config.peak_lr * (config.lr_min_fraction + (1 - config.lr_min_fraction) * remaining)


class PolicyOptimizer:
    """Updates parameters from gradients that were accumulated as raw sums.

    Args:
        parameters: Of the policy; frozen ones are left alone.
        run_updates: Updates of the whole run, over which the learning rate decays.
        fused: Whether AdamW updates in one kernel, which needs no temporaries.
        host: Where AdamW's moments are between two updates; None: on the device.
        replica_group: The ranks that hold the same rows, one in each replica; None: there is one replica.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        config: TrainerConfig,
        *,
        run_updates: int = 0,
        fused: bool = False,
        host: HostTensors | None = None,
        replica_group: dist.ProcessGroup | None = None,
    ):
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.config = config
        self.run_updates = run_updates
        self.host = host
        self.replica_group = replica_group
        self.torch_optimizer = _make(self.parameters, config, fused=fused)
        self.updates = 0  # applied updates: the position in the learning-rate schedule
        self.skipped_in_a_row = 0

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the state tensors of each parameter."""
        return SLOTS[self.config.optimizer]

    def update(self, *, scale: float) -> UpdateResult:
        """Scale the accumulated sums to the gradient of the loss, clip it and update, if it is finite. A collective."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        lr = learning_rate(self.config, self.updates, run_updates=self.run_updates)

        # Without trajectories, no rank has a gradient.
        if not gradients:
            return UpdateResult(False, 0.0, lr)

        self._scale(gradients, scale)
        norm = grad_norm(gradients)
        if not torch.isfinite(norm):
            self.zero_grad()
            self.skipped_in_a_row += 1
            return UpdateResult(False, float(norm), lr)

        limit = self.config.max_grad_norm
        if norm > limit:
            torch._foreach_mul_(gradients, float(limit / norm))

        for param_group in self.torch_optimizer.param_groups:
            param_group["lr"] = lr
        before = self._sampled()
        if self.host is not None:
            self.host.onload()
        self.torch_optimizer.step()
        self.zero_grad()
        self._offload_moments()

        self.skipped_in_a_row = 0
        self.updates += 1
        change = (self._sampled() - before).abs().mean() / before.abs().mean()
        return UpdateResult(True, float(norm), lr, change)

    def _scale(self, gradients: list[torch.Tensor], scale: float) -> None:
        """Scale gradients, which FSDP2 averaged over the ranks of a replica, and average them over the replicas."""
        if self.replica_group is None:
            torch._foreach_mul_(gradients, scale)
            return
        torch._foreach_mul_(gradients, scale / dist.get_world_size(self.replica_group))
        for gradient in gradients:
            dist.all_reduce(local_shard(gradient), group=self.replica_group)

    def _offload_moments(self) -> None:
        if self.host is not None:
            # Step counters are a few bytes each.
            self.host.offload(value for _, slot, value in self.state() if slot != "step")

    def _sampled(self) -> torch.Tensor:
        """Return a copy of some weights, on the first rank the same for any number of ranks."""
        return torch.cat([local_shard(each).detach()[:1].flatten()[:SAMPLED_WEIGHTS] for each in self.parameters])

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def state(self) -> Iterator[tuple[torch.Tensor, str, torch.Tensor]]:
        """Yield (parameter, slot, value) for every parameter that was updated before."""
        for parameter in self.parameters:
            state = self.torch_optimizer.state.get(parameter, {})
            yield from ((parameter, slot, state[slot]) for slot in self.slots if slot in state)

    def restore(
        self, state: Mapping[torch.Tensor, Mapping[str, torch.Tensor]], *, updates: int, skipped_in_a_row: int
    ) -> None:
        """Load a saved state: slot → value for each parameter that had been updated."""
        param_groups = self.torch_optimizer.param_groups
        order = [parameter for param_group in param_groups for parameter in param_group["params"]]
        by_index = {index: dict(state[parameter]) for index, parameter in enumerate(order) if parameter in state}

        settings = self.torch_optimizer.state_dict()["param_groups"]
        self.torch_optimizer.load_state_dict({"state": by_index, "param_groups": settings})
        self._offload_moments()
        self.updates = updates
        self.skipped_in_a_row = skipped_in_a_row

    def require_updates(self) -> None:
        """Raise `RunError` when more than `MAX_SKIPPED_UPDATES` in a row were skipped."""
        if self.skipped_in_a_row > MAX_SKIPPED_UPDATES:
            raise RunError(f"the gradient was not finite {self.skipped_in_a_row} updates in a row; the run stops")


def grad_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm [] float64 over all parameters and ranks: local squares, then one all-reduce."""
    local = [local_shard(gradient) for gradient in gradients]
    # In float64 on the host: not every device has it.
    squared = torch.stack(torch._foreach_norm(local)).cpu().double().square().sum()
    if any(isinstance(gradient, DTensor) for gradient in gradients):
        dist.all_reduce(squared)
        squared /= replicas(gradients[0])
    return squared.sqrt()


def _make(parameters: list[torch.nn.Parameter], config: TrainerConfig, *, fused: bool) -> torch.optim.Optimizer:
    # Norms and biases are not decayed.
    matrices = [parameter for parameter in parameters if parameter.dim() > 1]
    vectors = [parameter for parameter in parameters if parameter.dim() <= 1]
    param_groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    if config.optimizer is Optimizer.sgd:
        return torch.optim.SGD(param_groups, lr=config.peak_lr)
    # None, not False: with False torch would not use its foreach kernels either, and update tensor by tensor.
    return torch.optim.AdamW(param_groups, lr=config.peak_lr, betas=BETAS, fused=fused or None)
