"""A reference train step without the application: transformers, one trajectory at a time, in float64."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from app.config.algorithm import Aggregation, AlgorithmConfig, Correction, Kl, OldPolicy, RatioLevel
from app.device.torchvision_shim import transformers
from app.types import ScoredGroup, Trajectory
from tests.model.support import relative
from tests.trainer.support import LIMIT, SGD, TEMPERATURE, Result


def transformers_model(path: Path) -> Any:
    return transformers().AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float64)


def token_logprobs(model: Any, trajectory: Trajectory, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies of a completion, both [T] float64."""
    prompt = torch.as_tensor(trajectory.prompt.token_ids, dtype=torch.int64)
    completion = torch.as_tensor(trajectory.completion.token_ids, dtype=torch.int64)
    logits = model(input_ids=torch.cat([prompt, completion])[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
    logs = torch.log_softmax(logits.double() / temperature, dim=-1)
    return logs.gather(1, completion[:, None]).squeeze(1), -(logs.exp() * logs).sum(dim=1)


def loss(
    model: Any,
    groups: Sequence[ScoredGroup],
    config: AlgorithmConfig,
    correction: Correction,
    *,
    old: dict[tuple[str, int], Tensor] | None = None,
    reference: Any = None,
) -> Tensor:
    """Return the loss of an update.

    Args:
        old: π_old's log-probabilities by (prompt id, member); None: the current ones.
    """
    terms = []
    tokens = 0
    sequences = 0
    for scored in groups:
        for member, trajectory in enumerate(scored.group.trajectories):
            sequences += 1
            length = len(trajectory.completion.token_ids)
            tokens += length
            if length == 0 or (config.mask_truncated and trajectory.completion.truncated):
                continue

            logprobs, entropy = token_logprobs(model, trajectory, TEMPERATURE)
            old_logprobs = old[scored.group.prompt.id, member] if old else logprobs.detach()
            token_losses = -surrogate(
                logprobs, old_logprobs, trajectory, float(scored.advantages[member]), config, correction
            )
            if config.kl is Kl.k3:
                with torch.no_grad():
                    reference_logprobs, _ = token_logprobs(reference, trajectory, TEMPERATURE)
                difference = reference_logprobs - logprobs
                token_losses = token_losses + config.kl_coefficient * (difference.exp() - difference - 1)
            token_losses = token_losses - config.entropy_coefficient * entropy

            divisor = length if config.aggregation is Aggregation.seq_mean_token_mean else 1
            terms.append(token_losses.sum() / divisor)

    denominator = {
        Aggregation.token_mean: tokens,
        Aggregation.seq_mean_token_mean: sequences,
        Aggregation.seq_mean_token_sum: sequences,
        Aggregation.seq_mean_token_sum_norm: sequences * LIMIT,
    }[config.aggregation]
    return torch.stack(terms).sum() / denominator


def surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    trajectory: Trajectory,
    advantage: float,
    config: AlgorithmConfig,
    correction: Correction,
) -> Tensor:
    """Return the clipped, corrected objective of each token, [T]."""
    rollout_logprobs = torch.as_tensor(trajectory.completion.logprobs, dtype=torch.float64)
    difference = logprobs - (rollout_logprobs if config.old_policy is OldPolicy.rollout else old_logprobs)
    # GSPO: every token has the ratio of its sequence.
    if config.ratio is RatioLevel.sequence:
        difference = difference.mean().expand(len(logprobs))

    ratio = difference.exp()
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    weight = (
        (old_logprobs - rollout_logprobs).exp().clamp(max=config.correction_high or 2.0)
        if correction is Correction.tis
        else 1.0
    )
    return weight * torch.minimum(ratio * advantage, clipped * advantage)


def assert_step(ours: Result, model: Any, loss: Tensor) -> None:
    """Compare a step's loss, gradients, their norm, and the parameters after one update of SGD."""
    loss.backward()
    theirs = {name: parameter.grad for name, parameter in model.named_parameters()}
    norm = torch.stack([gradient.norm() for gradient in theirs.values()]).norm().item()
    assert ours.metrics["loss/total"] == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    assert ours.metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    for name, gradient in ours.gradients[0].items():
        assert relative(gradient, theirs[name]) < 1e-5, name
        assert relative(ours.after[name], ours.before[name] - SGD.lr * theirs[name]) < 1e-6, name
