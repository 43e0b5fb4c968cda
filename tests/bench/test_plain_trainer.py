"""The baselines of the trainer benchmark do the application's computation, with as little padding as they can."""

from pathlib import Path

import pytest
import torch

from tests.bench.flops import matrix_flops
from tests.bench.plain_trainer import PlainTrainer, microbatches
from tests.bench.trainer import BUDGET, PROMPTS, make_groups
from tests.model.support import relative, save_qwen3
from tests.trainer import plain
from tests.trainer.support import scored_groups


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3(tmp_path_factory.mktemp("policy"))


def padded_positions(lengths: list[int], budget: int, *, naive: bool) -> int:
    return sum(
        len(rows) * (max(lengths) if naive else max(lengths[row] for row in rows))
        for rows in microbatches(lengths, budget, naive=naive)
    )


def test_on_the_benchmark_the_baseline_pads_to_1_5_times_the_tokens_and_the_naive_loop_to_4_2_times() -> None:
    lengths = [each.tokens for scored in make_groups(PROMPTS, seed=0) for each in scored.group.trajectories]
    assert sum(lengths) == 2685
    assert padded_positions(lengths, BUDGET, naive=False) == 4098
    assert padded_positions(lengths, BUDGET, naive=True) == 11328


@pytest.mark.parametrize("naive", [False, True])
@pytest.mark.usefixtures("one_thread")
def test_both_loops_have_the_gradient_of_one_trajectory_at_a_time(naive: bool, path: Path) -> None:
    groups = scored_groups(4, shortest=1)
    reference = plain.transformers_model(path)
    for scored in groups:
        for trajectory, advantage in zip(scored.group.trajectories, scored.advantages, strict=True):
            logprobs, _ = plain.token_logprobs(reference, trajectory, temperature=1.0)
            (-float(advantage) * logprobs.mean() / 16).backward()

    baseline = PlainTrainer(path, budget=60, naive=naive)
    baseline.accumulate(groups)

    for (name, ours), theirs in zip(baseline.model.named_parameters(), reference.parameters(), strict=True):
        assert relative(ours.grad.double(), theirs.grad) < 1e-4, name


def test_flops_of_products_and_attention_are_counted_forward_and_backward() -> None:
    left, right = torch.ones(3, 4, requires_grad=True), torch.ones(4, 5, requires_grad=True)
    assert matrix_flops(lambda: (left @ right).sum().backward()) == 3 * 2 * 3 * 4 * 5
    assert matrix_flops(lambda: torch.zeros(3, 5).addmm_(left.detach(), right.detach())) == 2 * 3 * 4 * 5

    query = torch.ones(1, 2, 7, 8, requires_grad=True)
    attention = torch.nn.functional.scaled_dot_product_attention
    product = 2 * 2 * 7 * 7 * 8
    assert matrix_flops(lambda: attention(query, query, query, is_causal=True).sum().backward()) == 7 * product
