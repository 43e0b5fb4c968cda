"""Microbatches hold every trajectory once, every rank has one in every pass, and packing matches a plain loop."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from app.trainer.microbatch import Passes, Workload, make_samples, pack, plan_microbatches, ready_passes
from app.trainer.throughput import Cost
from tests.trainer.support import scored_groups

LENGTHS = st.lists(st.integers(1, 300), max_size=60)
RANKS, BUDGET = st.integers(1, 5), st.integers(1, 200)
CPU = torch.device("cpu")


LINEAR, HEAD, QUADRATIC = 1.0, 0.5, 1 / 100
COST = Cost(LINEAR, HEAD, QUADRATIC)


def work(lengths: list[int], prefixes: list[bytes] | None = None) -> Workload:
    """Sequences of which all tokens are sampled; by default without a common lead."""
    return Workload(lengths, lengths, apart(lengths) if prefixes is None else prefixes, COST)


def apart(lengths: list[int]) -> list[bytes]:
    """Prefixes of sequences that share none."""
    return [index.to_bytes(4, "little") for index in range(len(lengths))]


@given(LENGTHS, RANKS, BUDGET)
def test_every_index_is_in_one_microbatch_within_the_budget_and_every_rank_has_one_in_every_pass(
    lengths: list[int], ranks: int, budget: int
) -> None:
    passes = plan_microbatches(work(lengths), ranks=ranks, budget=budget)
    microbatches = [members for by_rank in passes for members in by_rank]
    assert sorted(index for members in microbatches for index in members) == list(range(len(lengths)))
    for members in microbatches:
        assert len(members) <= 1 or sum(lengths[index] for index in members) <= budget
    assert all(len(by_rank) == ranks and any(by_rank) for by_rank in passes)


def test_oversized_trajectories_take_one_rank_of_a_pass_each() -> None:
    assert plan_microbatches(work([1000, 999, 998]), ranks=2, budget=100) == [[[0], [1]], [[2], []]]


@given(st.lists(st.integers(1, 300), max_size=60), RANKS, st.integers(100, 400))
def test_ready_passes_are_full_and_balanced_and_part_of_the_plan(lengths: list[int], ranks: int, budget: int) -> None:
    planned = plan_microbatches(work(lengths), ranks=ranks, budget=budget)
    ready, waiting = ready_passes(work(lengths), ranks=ranks, budget=budget)
    computed = [index for by_rank in ready for members in by_rank for index in members]
    assert sorted(computed + waiting) == list(range(len(lengths)))
    assert all(by_rank in planned for by_rank in ready)

    def cost(members: list[int]) -> float:
        return sum((LINEAR + HEAD) * lengths[index] + QUADRATIC * lengths[index] ** 2 for index in members)

    for by_rank in planned:
        tokens = sum(lengths[index] for members in by_rank for index in members)
        slowest = max(map(cost, by_rank))
        wanted = tokens >= 0.8 * ranks * budget and sum(map(cost, by_rank)) >= 0.97 * ranks * slowest
        assert (by_rank in ready) is wanted


def test_sequences_of_a_prompt_stay_together_where_that_saves_more_than_it_costs() -> None:
    long, short = [bytes(4 * 100), bytes([1] * 400)], [bytes(4), bytes([1] * 4)]
    lengths = [130, 110, 110, 130]  # two of each prompt: together they cost more than 240 and less
    for prefixes, together in ((long, True), (short, False)):
        each = [prefixes[0], prefixes[1], prefixes[1], prefixes[0]]
        [[first, second]] = plan_microbatches(work(lengths, each), ranks=2, budget=300)
        assert ({*first} in ({0, 3}, {1, 2})) is together
        assert sorted([*first, *second]) == [0, 1, 2, 3]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(10, 90)), max_size=40), RANKS, st.integers(100, 400))
def test_plans_with_common_prefixes_keep_the_budget_and_cost_no_more_than_without(
    sequences: list[tuple[int, int]], ranks: int, budget: int
) -> None:
    lengths = [length for _, length in sequences]
    prefixes = [bytes([prefix] * 36) for prefix, _ in sequences]  # 9 tokens

    def total(passes: Passes) -> float:
        def one(members: list[int]) -> float:
            used = [prefixes[index] for index in members]
            alone = sum((LINEAR + HEAD) * lengths[index] + QUADRATIC * lengths[index] ** 2 for index in members)
            return alone - 9 * LINEAR * (len(used) - len(set(used)))

        return sum(max(one(members) for members in by_rank) for by_rank in passes)

    passes = plan_microbatches(work(lengths, prefixes), ranks=ranks, budget=budget)
    assert sorted(index for by_rank in passes for members in by_rank for index in members) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in members) <= budget for by_rank in passes for members in by_rank)
    assert total(passes) <= total(plan_microbatches(work(lengths), ranks=ranks, budget=budget)) + 1e-9


def test_packing_matches_a_loop_over_the_tokens() -> None:
    groups = scored_groups(5, seed=3)
    samples = make_samples(groups, mask_truncated=True)
    ids: list[int] = []
    positions: list[int] = []
    written: list[int] = []  # packed token at each place of the sequences end to end
    logit_positions: list[int] = []
    targets: list[int] = []
    sequence: list[int] = []
    logprobs: list[float] = []
    boundaries = [0]
    for group, scored in enumerate(groups):
        for member, trajectory in enumerate(scored.group.trajectories):
            prompt, completion = trajectory.prompt.token_ids, trajectory.completion
            for position, token in enumerate([*prompt, *completion.token_ids]):
                if position < len(prompt) - 1 and member:
                    written.append(written[boundaries[4 * group] + position])  # of the group's first sequence
                    continue
                if position >= len(prompt):
                    logit_positions.append(len(ids) - 1)  # the token before this one
                    targets.append(int(token))
                    sequence.append(len(boundaries) - 1)
                    logprobs.append(float(completion.logprobs[position - len(prompt)]))
                written.append(len(ids))
                ids.append(int(token))
                positions.append(position)
            boundaries.append(len(written))
    assert len(ids) < len(written)  # some tokens are shared
    micro = pack(samples, CPU)
    assert micro.input_ids.tolist() == [ids]
    assert micro.position_ids.tolist() == [positions]
    assert micro.packing.cu_seqlens.tolist() == boundaries
    assert micro.packing.full is not None
    assert micro.packing.full.source.tolist() == written
    assert micro.logit_positions.tolist() == logit_positions
    assert micro.targets.tolist() == targets == micro.input_ids[0, micro.logit_positions + 1].tolist()
    assert micro.sequence.tolist() == sequence
    assert micro.rollout_logprobs.tolist() == logprobs
    assert micro.lengths.tolist() == [sequence.count(index) for index in range(len(samples))]
    assert micro.trajectory_tokens.tolist() == micro.lengths.tolist()
    assert micro.trajectories == len(samples)
    assert 0 in micro.lengths.tolist()  # an empty completion counts as a sequence
    assert micro.keys == tuple((f"random/{group}@0", member, 0) for group in range(5) for member in range(4))
    truncated = [each.completion.truncated for scored in groups for each in scored.group.trajectories]
    assert True in truncated
    assert micro.weight_mask.tolist() == [0.0 if each else 1.0 for each in truncated]
    assert not micro.dummy


def test_packing_nothing_gives_a_dummy_without_weight() -> None:
    micro = pack([], CPU)
    assert micro.dummy
    assert micro.weight_mask.tolist() == [0.0]
    assert micro.advantages.tolist() == [0.0]
