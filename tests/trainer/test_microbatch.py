"""Passes hold every trajectory once and every rank as often; a packed pass is what a plain loop makes of it."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from app.trainer.microbatch import full_prefix, pack, plan_passes, samples_of
from tests.trainer.support import scored_groups

LENGTHS = st.lists(st.integers(1, 300), max_size=60)
RANKS, BUDGET = st.integers(1, 5), st.integers(1, 200)
CPU = torch.device("cpu")


@given(LENGTHS, RANKS, BUDGET, st.booleans())
def test_every_index_stands_in_one_bin(lengths: list[int], ranks: int, budget: int, alone: bool) -> None:
    passes = plan_passes(lengths, ranks=ranks, budget=budget, alone=alone)
    indices = [index for bins in passes for members in bins for index in members]
    assert sorted(indices) == list(range(len(lengths)))


@given(LENGTHS, RANKS, BUDGET)
def test_a_bin_keeps_the_budget_or_holds_one_trajectory(lengths: list[int], ranks: int, budget: int) -> None:
    for bins in plan_passes(lengths, ranks=ranks, budget=budget):
        for members in bins:
            assert len(members) <= 1 or sum(lengths[index] for index in members) <= budget


@given(LENGTHS, RANKS, BUDGET)
def test_every_rank_has_a_bin_in_every_pass_and_no_pass_is_empty(lengths: list[int], ranks: int, budget: int) -> None:
    passes = plan_passes(lengths, ranks=ranks, budget=budget)
    assert all(len(bins) == ranks for bins in passes)
    assert all(any(bins) for bins in passes)


@given(LENGTHS, RANKS, BUDGET)
def test_alone_puts_each_trajectory_into_a_bin_of_its_own(lengths: list[int], ranks: int, budget: int) -> None:
    passes = plan_passes(lengths, ranks=ranks, budget=budget, alone=True)
    assert len(passes) == -(-len(lengths) // ranks)
    assert all(len(members) <= 1 for bins in passes for members in bins)


def test_trajectories_longer_than_the_budget_cost_a_pass_for_each_rank_full() -> None:
    assert plan_passes([1000, 999, 998], ranks=2, budget=100) == [[[0], [1]], [[2], []]]


def test_the_bins_of_a_pass_cost_about_the_same() -> None:
    lengths = [37, 91, 12, 55, 60, 23, 78, 44, 19, 66, 31, 84]
    for bins in plan_passes(lengths, ranks=2, budget=200):
        tokens = [sum(lengths[index] for index in members) for members in bins]
        assert max(tokens) <= 1.25 * min(tokens)


@given(LENGTHS, RANKS, BUDGET)
def test_a_full_prefix_fits_into_whole_passes_and_leaves_less_than_a_pass_and_a_trajectory(
    lengths: list[int], ranks: int, budget: int
) -> None:
    taken = full_prefix(lengths, ranks=ranks, budget=budget)
    whole_pass = ranks * budget
    assert 0 <= taken <= len(lengths)
    assert sum(lengths[:taken]) <= sum(lengths) // whole_pass * whole_pass
    if taken < len(lengths):
        assert sum(lengths[taken:]) < whole_pass + lengths[taken]
    if sum(lengths) < whole_pass:
        assert taken == 0


def test_a_pack_is_what_a_loop_over_its_tokens_gives() -> None:
    samples = samples_of(scored_groups(5, seed=3), mask_truncated=True)
    ids, positions, logit_positions, targets, sequence, logprobs, borders = [], [], [], [], [], [], [0]
    for number, sample in enumerate(samples):
        prompt, completion = sample.trajectory.prompt.token_ids, sample.trajectory.completion
        for place, token in enumerate([*prompt, *completion.token_ids]):
            if place >= len(prompt):
                logit_positions.append(len(ids) - 1)  # the token before this one
                targets.append(int(token))
                sequence.append(number)
                logprobs.append(float(completion.logprobs[place - len(prompt)]))
            ids.append(int(token))
            positions.append(place)
        borders.append(len(ids))
    micro = pack(samples, CPU)
    assert micro.input_ids.tolist() == [ids]
    assert micro.position_ids.tolist() == [positions]
    assert micro.cu_seqlens.tolist() == borders
    assert micro.logit_positions.tolist() == logit_positions
    assert micro.targets.tolist() == targets == micro.input_ids[0, micro.logit_positions + 1].tolist()
    assert micro.sequence.tolist() == sequence
    assert micro.rollout_logprobs.tolist() == logprobs
    assert micro.lengths.tolist() == [sequence.count(number) for number in range(len(samples))]
    assert 0 in micro.lengths.tolist()  # an empty completion is a sequence too
    assert micro.keys == tuple((f"random/{group}@0", member) for group in range(5) for member in range(4))
    truncated = [sample.trajectory.completion.truncated for sample in samples]
    assert True in truncated
    assert micro.weight_mask.tolist() == [0.0 if each else 1.0 for each in truncated]
    assert not micro.dummy


def test_a_pack_of_nothing_is_a_dummy_without_weight() -> None:
    micro = pack([], CPU)
    assert micro.dummy
    assert micro.weight_mask.tolist() == [0.0]
    assert micro.advantages.tolist() == [0.0]
