"""Trial of a user's objectives and advantages on made-up values, before anything starts."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from app.config.algorithm import ADVANTAGES, OBJECTIVES, AlgorithmConfig
from app.config.teacher import TeacherConfig
from app.utils.user_code import require

REWARDS = ([0.0, 1.0, 0.0, 1.0], [0.25, 3.0])  # of groups
LENGTHS = (3, 0, 5)  # tokens of sequences


def require_own(config: AlgorithmConfig, teacher: TeacherConfig) -> None:
    """Raise `ConfigError` if a function that `algorithm.advantage` or `algorithm.objective` names cannot be used."""
    if config.advantage not in ADVANTAGES:
        accepted = "the path of a function from rewards [G] to finite advantages [G]"
        require("algorithm.advantage", config.advantage, accepted, _try_advantage)
    if config.objective not in OBJECTIVES:
        import torch  # noqa: F401  # not within the time for the user's module

        accepted = "the path of a function from (batch, ratio) to the finite terms [N] of its tokens, with a gradient"
        require("algorithm.objective", config.objective, accepted, partial(_try_objective, config, teacher))


def _try_advantage(function: Callable[..., Any]) -> str | None:
    """Return what is wrong with the function, if anything."""
    for rewards in REWARDS:
        advantages = np.asarray(function(np.array(rewards)))
        if advantages.shape != (len(rewards),):
            return f"for {len(rewards)} rewards it returned the shape {list(advantages.shape)}"
        if not np.isfinite(advantages.astype(np.float64)).all():
            return f"for the rewards {rewards} it returned {advantages.tolist()}"
    return None


def _try_objective(config: AlgorithmConfig, teacher: TeacherConfig, function: Callable[..., Any]) -> str | None:
    """Return what is wrong with the function, if anything, on a batch with the fields that it has in this run."""
    import torch

    from app.algorithm.objective import TokenBatch

    tokens = sum(LENGTHS)
    logprobs = -torch.rand(tokens, generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor(LENGTHS, dtype=torch.float32)
    old_logprobs = logprobs - 0.1
    batch = TokenBatch(
        logprobs=logprobs.requires_grad_(),
        old_logprobs=old_logprobs if config.needs_old_logprobs else None,
        rollout_logprobs=logprobs.detach() + 0.1,
        reference_logprobs=old_logprobs if config.needs_reference else None,
        entropy=torch.ones(tokens),
        sequence=torch.repeat_interleave(torch.arange(len(LENGTHS)), lengths.long()),
        advantages=torch.tensor([1.0, 0.5, -1.0]),
        lengths=lengths,
        trajectory_tokens=lengths,
        weight_mask=torch.ones(len(LENGTHS)),
        teacher_logprobs=old_logprobs if teacher.given else None,
        teacher=teacher,
        same_version=torch.ones(tokens, dtype=torch.bool),
    )
    terms = function(batch, (logprobs - old_logprobs).exp())

    if not isinstance(terms, torch.Tensor) or terms.shape != (tokens,):
        shape = list(getattr(terms, "shape", ()))
        return f"for {tokens} tokens it returned a {type(terms).__name__} of shape {shape}"
    if not terms.requires_grad:
        return "its terms have no gradient"
    terms.sum().backward()
    gradient = logprobs.grad
    if gradient is None or not torch.isfinite(torch.cat([terms.detach(), gradient])).all():
        return "its terms or their gradients are not finite"
    return None
