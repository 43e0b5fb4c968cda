"""A teacher in the loss: the expected gradient is that of the reverse KL, and a whole step matches float64."""

import itertools
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from app.algorithm.advantage import score
from app.algorithm.loss import policy_loss
from app.algorithm.objective import TokenBatch
from app.config.algorithm import Aggregation, AlgorithmConfig, Correction
from app.config.teacher import TeacherConfig
from app.trainer.remote import slim
from app.types import ScoredGroup
from tests.algorithm.groups import group
from tests.model.support import relative, save_qwen3
from tests.refusals import refused
from tests.trainer import plain
from tests.trainer.support import TEMPERATURE, Scenario, play, sampled, scored_groups, with_each

VOCABULARY, LENGTH = 4, 3
DISTILL = AlgorithmConfig(reward_coefficient=0, group_size=1, aggregation=Aggregation.seq_mean_token_sum)


def logits_of(seed: int) -> Tensor:
    """Logits of each token after each prefix: a table, float64."""
    return torch.randn(LENGTH, VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed)).double()


def logprobs_of(logits: Tensor, tokens: Sequence[int]) -> Tensor:
    """Log-probabilities of a sequence; a token depends on its position and on the token before it."""
    logs = torch.log_softmax(logits, dim=-1)
    before = [0, *tokens[:-1]]
    return torch.stack([logs[at, prior, token] for at, (prior, token) in enumerate(zip(before, tokens, strict=True))])


def batch_of(logits: Tensor, teacher: Tensor, tokens: Sequence[int], config: TeacherConfig) -> TokenBatch:
    logprobs = logprobs_of(logits, tokens)
    one = torch.ones(1, dtype=torch.float64)
    return TokenBatch(
        logprobs=logprobs,
        old_logprobs=None,
        rollout_logprobs=logprobs.detach(),
        reference_logprobs=None,
        entropy=torch.zeros_like(logprobs),
        sequence=torch.zeros(LENGTH, dtype=torch.int64),
        advantages=0 * one,
        lengths=LENGTH * one,
        trajectory_tokens=LENGTH * one,
        weight_mask=one,
        teacher_logprobs=logprobs_of(teacher, tokens),
        teacher=config,
    )


@pytest.mark.parametrize("objective", ["ppo", "cispo"])
def test_the_expected_gradient_is_that_of_the_reverse_kl(objective: str) -> None:
    """Over all sequences: of the KL at each token, with the policy's own distribution of prefixes."""
    policy, teacher = logits_of(0).requires_grad_(), logits_of(1)
    config = replace(DISTILL, objective=objective)
    expected = torch.zeros(())
    for tokens in itertools.product(range(VOCABULARY), repeat=LENGTH):
        probability = logprobs_of(policy, tokens).sum().exp().detach()
        batch = batch_of(policy, teacher, tokens, TeacherConfig(coefficient=0.7, clip=100.0))
        expected = expected + probability * policy_loss(batch, config, Correction.none).loss
    expected.backward()
    estimated = policy.grad
    assert estimated is not None

    ours = logits_of(0).requires_grad_()
    logs, target = torch.log_softmax(ours, dim=-1), torch.log_softmax(teacher, dim=-1)
    kl = (logs.exp() * (logs - target)).sum(dim=-1)  # [LENGTH, before]
    prefix = torch.zeros(VOCABULARY, dtype=torch.float64)
    prefix[0] = 1.0
    exact = torch.zeros((), dtype=torch.float64)
    for at in range(LENGTH):
        exact = exact + 0.7 * (prefix * kl[at]).sum()
        prefix = (prefix[:, None] * logs[at].exp().detach()).sum(dim=0)
    exact.backward()
    assert ours.grad is not None
    torch.testing.assert_close(estimated, ours.grad, rtol=1e-10, atol=1e-12)


def test_the_difference_of_a_token_is_clipped_and_counted() -> None:
    policy, teacher = logits_of(0), logits_of(1)
    batch = batch_of(policy, teacher, (1, 2, 3), TeacherConfig(coefficient=2.0, clip=0.5))
    assert batch.teacher_logprobs is not None
    difference = batch.logprobs - batch.teacher_logprobs
    assert batch.token_advantages.tolist() == (-2.0 * difference.clamp(-0.5, 0.5)).tolist()
    sums = policy_loss(batch, DISTILL, Correction.none).sums
    assert sums["teacher/kl"].item() == pytest.approx(difference.sum().item())
    assert sums["teacher/clipped_fraction"].item() == (difference.abs() > 0.5).sum().item() > 0


def taught(groups: Sequence[ScoredGroup], seed: int = 3) -> list[ScoredGroup]:
    """Return the groups with random log-probabilities of a teacher."""
    random = np.random.default_rng(seed)
    return with_each(
        groups, lambda each: each.with_teacher([random.normal(-3, 1, each.sampled_tokens).astype(np.float32)])
    )


def test_a_step_with_a_teacher_matches_transformers_and_a_pickled_one(tmp_path: Path) -> None:
    path = save_qwen3(tmp_path)
    groups = taught(sampled(path, scored_groups(6)))
    algorithm = AlgorithmConfig(prompts_per_step=6, group_size=4, aggregation=Aggregation.token_mean)
    scenario = Scenario(algorithm, pickle.loads(pickle.dumps(slim(groups))), pieces=2)
    ours = play(path, scenario)

    model = plain.transformers_model(path)
    loss, tokens, differences = torch.zeros((), dtype=torch.float64), 0, 0.0
    for scored in groups:
        for trajectory, advantage in zip(scored.group.trajectories, scored.advantages, strict=True):
            if not trajectory.sampled_tokens:
                continue
            logprobs, _ = plain.token_logprobs(model, trajectory, TEMPERATURE)
            difference = logprobs.detach() - torch.as_tensor(trajectory.completion.teacher_logprobs).double()
            loss = loss - ((float(advantage) - difference) * logprobs).sum()
            tokens += len(logprobs)
            differences += difference.sum().item()
    (loss / tokens).backward()
    for name, parameter in model.named_parameters():
        assert relative(ours.gradients[0][name], parameter.grad) < 1e-5, name
    assert ours.metrics["teacher/kl"] == pytest.approx(differences / tokens, rel=1e-5)


def test_without_rewards_every_advantage_is_zero_and_one_trajectory_is_a_group() -> None:
    unscored = group([0.0, 1.0])
    assert score(unscored, DISTILL, max_completion_tokens=8).advantages.tolist() == [0.0, 0.0]
    half = replace(DISTILL, reward_coefficient=0.5, group_size=2, normalize_by_std=False)
    assert score(unscored, half, max_completion_tokens=8).advantages.tolist() == [-0.25, 0.25]
    DISTILL.validate()
    with refused("algorithm.group_size", 1):
        replace(DISTILL, reward_coefficient=1.0).validate()
    with refused("algorithm.dynamic_sampling"):
        replace(DISTILL, dynamic_sampling=True).validate()
