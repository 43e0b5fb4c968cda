"""Microbatches hold every trajectory once, every rank has one in every pass, and packing matches a plain loop."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from app.trainer.microbatch import count_ready, make_samples, pack, plan_microbatches
from tests.trainer.support import scored_groups

LENGTHS = st.lists(st.integers(1, 300), max_size=60)
RANKS, BUDGET = st.integers(1, 5), st.integers(1, 200)
CPU = torch.device("cpu")


@given(LENGTHS, RANKS, BUDGET)
def test_every_index_is_in_one_microbatch(lengths: list[int], ranks: int, budget: int) -> None:
    passes = plan_microbatches(lengths, ranks=ranks, budget=budget)
    indices = [index for by_rank in passes for members in by_rank for index in members]
    assert sorted(indices) == list(range(len(lengths)))


@given(LENGTHS, RANKS, BUDGET)
def test_a_microbatch_keeps_the_budget_or_holds_one_trajectory(lengths: list[int], ranks: int, budget: int) -> None:
    for by_rank in plan_microbatches(lengths, ranks=ranks, budget=budget):
        for members in by_rank:
            assert len(members) <= 1 or sum(lengths[index] for index in members) <= budget


@given(LENGTHS, RANKS, BUDGET)
def test_every_rank_has_a_microbatch_in_every_pass_and_no_pass_is_empty(
    lengths: list[int], ranks: int, budget: int
) -> None:
    passes = plan_microbatches(lengths, ranks=ranks, budget=budget)
    assert all(len(by_rank) == ranks for by_rank in passes)
    assert all(any(by_rank) for by_rank in passes)


def test_oversized_trajectories_take_one_rank_of_a_pass_each() -> None:
    assert plan_microbatches([1000, 999, 998], ranks=2, budget=100) == [[[0], [1]], [[2], []]]


def test_the_microbatches_of_a_pass_cost_about_the_same() -> None:
    lengths = [37, 91, 12, 55, 60, 23, 78, 44, 19, 66, 31, 84]
    for by_rank in plan_microbatches(lengths, ranks=2, budget=200):
        tokens = [sum(lengths[index] for index in members) for members in by_rank]
        assert max(tokens) <= 1.25 * min(tokens)


@given(LENGTHS, RANKS, BUDGET)
def test_ready_trajectories_fit_into_whole_passes_and_leave_less_than_a_pass_and_a_trajectory(
    lengths: list[int], ranks: int, budget: int
) -> None:
    ready = count_ready(lengths, ranks=ranks, budget=budget)
    whole_pass = ranks * budget
    assert 0 <= ready <= len(lengths)
    assert sum(lengths[:ready]) <= sum(lengths) // whole_pass * whole_pass
    if ready < len(lengths):
        assert sum(lengths[ready:]) < whole_pass + lengths[ready]
    if sum(lengths) < whole_pass:
        assert ready == 0


def test_packing_matches_a_loop_over_the_tokens() -> None:
    groups = scored_groups(5, seed=3)
    samples = make_samples(groups, mask_truncated=True)
    trajectories = [trajectory for scored in groups for trajectory in scored.group.trajectories]
    ids: list[int] = []
    positions: list[int] = []
    logit_positions: list[int] = []
    targets: list[int] = []
    sequence: list[int] = []
    logprobs: list[float] = []
    boundaries = [0]
    for index, trajectory in enumerate(trajectories):
        prompt, completion = trajectory.prompt.token_ids, trajectory.completion
        for position, token in enumerate([*prompt, *completion.token_ids]):
            if position >= len(prompt):
                logit_positions.append(len(ids) - 1)  # the token before this one
                targets.append(int(token))
                sequence.append(index)
                logprobs.append(float(completion.logprobs[position - len(prompt)]))
            ids.append(int(token))
            positions.append(position)
        boundaries.append(len(ids))
    micro = pack(samples, CPU)
    assert micro.input_ids.tolist() == [ids]
    assert micro.position_ids.tolist() == [positions]
    assert micro.packing.cu_seqlens.tolist() == boundaries
    assert micro.logit_positions.tolist() == logit_positions
    assert micro.targets.tolist() == targets == micro.input_ids[0, micro.logit_positions + 1].tolist()
    assert micro.sequence.tolist() == sequence
    assert micro.rollout_logprobs.tolist() == logprobs
    assert micro.lengths.tolist() == [sequence.count(index) for index in range(len(samples))]
    assert micro.trajectory_tokens.tolist() == micro.lengths.tolist()
    assert micro.trajectories == len(samples)
    assert 0 in micro.lengths.tolist()  # an empty completion counts as a sequence
    assert micro.keys == tuple((f"random/{group}@0", member, 0) for group in range(5) for member in range(4))
    truncated = [trajectory.completion.truncated for trajectory in trajectories]
    assert True in truncated
    assert micro.weight_mask.tolist() == [0.0 if each else 1.0 for each in truncated]
    assert not micro.dummy


def test_packing_nothing_gives_a_dummy_without_weight() -> None:
    micro = pack([], CPU)
    assert micro.dummy
    assert micro.weight_mask.tolist() == [0.0]
    assert micro.advantages.tolist() == [0.0]
