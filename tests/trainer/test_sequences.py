"""Trajectories of several sequences: their gradients are those of their turns, and a trajectory counts once."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from app.config.algorithm import Aggregation, AlgorithmConfig, Correction, OldPolicy, RatioLevel
from app.trainer.microbatch import make_samples, pack
from app.types import (
    Completion,
    Ending,
    Episode,
    FinishReason,
    Group,
    Prompt,
    ScoredGroup,
    TokenSequence,
    Trajectory,
    VersionSpan,
)
from tests.model.support import relative
from tests.trainer import plain
from tests.trainer.ranks import play_on
from tests.trainer.support import TEMPERATURE, Scenario, play, tokens
from tests.trainer.test_ranks import assert_same

GRPO = AlgorithmConfig(prompts_per_step=6, group_size=4)
ALGORITHMS = {
    "grpo": GRPO,
    "dapo": replace(GRPO, aggregation=Aggregation.token_mean, clip_high=0.28, old_policy=OldPolicy.rollout),
    "gspo": replace(GRPO, ratio=RatioLevel.sequence, old_policy=OldPolicy.rollout, clip_low=0.02),
}
CPU = torch.device("cpu")


def episodes(count: int, *, seed: int = 0) -> list[ScoredGroup]:
    """Groups of trajectories with one to three sequences, of one to three turns each."""
    random = np.random.default_rng(seed)
    groups = []
    for index in range(count):
        prompt = Prompt(f"episodes/{index}@0", tokens(random, 4), "", "episodes")
        trajectories = [trajectory(prompt, random, sequences=1 + (index + member) % 3) for member in range(4)]
        groups.append(ScoredGroup(Group(prompt, tuple(trajectories)), random.normal(size=4).astype(np.float32)))
    return groups


def trajectory(prompt: Prompt, random: np.random.Generator, *, sequences: int) -> Trajectory:
    return of_sequences(prompt, [sequence(prompt, random, turns=int(random.integers(1, 4))) for _ in range(sequences)])


def of_sequences(prompt: Prompt, sequences: Sequence[TokenSequence]) -> Trajectory:
    last = sequences[-1]
    completion = Completion(last.token_ids[last.sampled], last.logprobs, FinishReason.stop, last.spans)
    return Trajectory(prompt, completion, "", episode=Episode(tuple(sequences), (), Ending.stop, {}, {}))


def sequence(prompt: Prompt, random: np.random.Generator, *, turns: int) -> TokenSequence:
    pieces = [prompt.token_ids]
    sampled = [np.zeros(len(prompt.token_ids), dtype=bool)]
    for turn in range(turns):
        if turn:
            observation = tokens(random, int(random.integers(1, 4)))
            pieces.append(observation)
            sampled.append(np.zeros(len(observation), dtype=bool))
        reply = tokens(random, int(random.integers(1, 5)))
        pieces.append(reply)
        sampled.append(np.ones(len(reply), dtype=bool))

    mask = np.concatenate(sampled)
    count = int(mask.sum())
    logprobs = random.normal(-4.6, 0.1, count).astype(np.float32)
    return TokenSequence(np.concatenate(pieces), mask, logprobs, (VersionSpan(0, 0, count),))


def turns_alone(sequence: TokenSequence) -> Iterator[Trajectory]:
    """Each turn of a sequence as a trajectory of its own, whose prompt is everything before it."""
    edges = np.flatnonzero(np.diff(sequence.sampled.astype(int), prepend=0, append=0))
    taken = 0
    for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        prompt = Prompt("alone/0@0", sequence.token_ids[:start], "", "alone")
        logprobs = sequence.logprobs[taken : taken + end - start]
        taken += end - start
        yield Trajectory(prompt, Completion(sequence.token_ids[start:end], logprobs, FinishReason.stop, ()), "")


def loss_of_turns(model: Any, groups: Sequence[ScoredGroup], config: AlgorithmConfig) -> Tensor:
    """The loss of an update from its turns alone, in float64."""
    terms = []
    counted = 0
    for scored in groups:
        for each, advantage in zip(scored.group.trajectories, scored.advantages, strict=True):
            total = sum(int(sequence.sampled.sum()) for sequence in each.sequences)
            counted += total
            objectives = [objective(model, sequence, float(advantage), config) for sequence in each.sequences]
            divisor = total if config.aggregation is Aggregation.seq_mean_token_mean else 1
            terms.append(-torch.cat(objectives).sum() / divisor)

    denominator = {Aggregation.token_mean: counted, Aggregation.seq_mean_token_mean: len(terms)}[config.aggregation]
    return torch.stack(terms).sum() / denominator


def objective(model: Any, sequence: TokenSequence, advantage: float, config: AlgorithmConfig) -> Tensor:
    """The objective of each sampled token of a sequence, [N]."""
    logprobs = torch.cat([plain.token_logprobs(model, turn, TEMPERATURE)[0] for turn in turns_alone(sequence)])
    whole = Trajectory(
        Prompt("", np.zeros(1), "", ""), Completion(np.zeros(1), sequence.logprobs, FinishReason.stop, ()), ""
    )
    return plain.surrogate(logprobs, logprobs.detach(), whole, advantage, config, Correction.none)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_gradients_are_the_sum_over_the_turns_with_everything_before_them_as_prompt(name: str, path: Path) -> None:
    groups = episodes(6)
    ours = play(path, Scenario(ALGORITHMS[name], groups))

    model = plain.transformers_model(path)
    loss = loss_of_turns(model, groups, ALGORITHMS[name])
    loss.backward()
    assert ours.metrics["loss/total"] == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    for parameter, tensor in model.named_parameters():
        assert relative(ours.gradients[0][parameter], tensor.grad) < 1e-5, parameter


def test_two_ranks_compute_the_step_of_one(path: Path, tmp_path: Path) -> None:
    scenarios = {name: Scenario(ALGORITHMS[name], episodes(6)) for name in ("grpo", "dapo", "gspo")}
    scenarios["two updates"] = Scenario(replace(GRPO, updates_per_step=2), episodes(6))
    on_two_ranks = play_on(2, path, scenarios, tmp_path / "results.pt")
    for name, scenario in scenarios.items():
        assert_same(on_two_ranks[name], play(path, scenario))


def test_an_update_has_whole_groups_however_many_sequences_they_have(path: Path) -> None:
    groups = episodes(6)
    ours = play(path, Scenario(replace(GRPO, updates_per_step=3), groups))
    first = play(path, Scenario(replace(GRPO, prompts_per_step=2), groups[:2]))
    assert ours.updates == 3
    for name, gradient in first.gradients[0].items():
        assert relative(ours.gradients[0][name], gradient) < 1e-6, name


def test_a_cut_trajectory_counts_once_in_every_denominator(path: Path) -> None:
    random = np.random.default_rng(1)
    prompt = Prompt("episodes/0@0", tokens(random, 4), "", "episodes")
    whole = [of_sequences(prompt, [sequence(prompt, random, turns=2)]) for _ in range(3)]
    cut = of_sequences(prompt, list(whole[0].sequences) * 2)
    advantages = np.array([1.0, -0.5, -0.5], dtype=np.float32)

    micro = pack(make_samples([ScoredGroup(Group(prompt, (cut, *whole[1:])), advantages)], mask_truncated=False), CPU)
    sampled = whole[0].sampled_tokens
    assert micro.trajectories == 3
    assert len(micro.keys) == 4
    assert micro.trajectory_tokens.tolist()[:2] == [2 * sampled, 2 * sampled]
    assert micro.lengths.tolist()[:2] == [sampled, sampled]
    assert micro.advantages.tolist() == [1.0, 1.0, -0.5, -0.5]

    # The same tokens twice, each at half the weight: the step of the uncut trajectory, if means are over trajectories.
    groups = [ScoredGroup(Group(prompt, (first, *whole[1:])), advantages) for first in (cut, whole[0])]
    twice, once = (play(path, Scenario(GRPO, [each])) for each in groups)
    for name, gradient in once.gradients[0].items():
        assert relative(twice.gradients[0][name], gradient) < 1e-5, name
    assert twice.metrics["ratio/sequence_mean"] == pytest.approx(once.metrics["ratio/sequence_mean"])
