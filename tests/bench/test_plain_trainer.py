"""The baselines of the trainer benchmark do the application's computation, with as little padding as they can."""

import os
from pathlib import Path

import pytest
import torch

from tests.bench import machine
from tests.bench.flops import matrix_flops
from tests.bench.plain_trainer import PlainTrainer, microbatches
from tests.bench.trainer import BUDGET, PROMPTS, make_groups
from tests.model.support import relative, save_qwen3
from tests.trainer import plain
from tests.trainer.support import scored_groups

LENGTHS = [5, 100, 90, 6, 7]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3(tmp_path_factory.mktemp("policy"))


def padded_positions(lengths: list[int], budget: int, *, naive: bool) -> int:
    return sum(
        len(rows) * (max(lengths) if naive else max(lengths[row] for row in rows))
        for rows in microbatches(lengths, budget, naive=naive)
    )


def test_the_baseline_sorts_by_length_and_the_naive_loop_keeps_the_order() -> None:
    assert microbatches(LENGTHS, 200, naive=False) == [[1, 2], [4, 3, 0]]
    assert microbatches(LENGTHS, 200, naive=True) == [[0, 1], [2, 3], [4]]


def test_a_row_longer_than_the_budget_has_a_microbatch_of_its_own() -> None:
    assert microbatches(LENGTHS, 95, naive=False) == [[1], [2], [4, 3, 0]]


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


def test_a_result_is_marked_busy_when_others_took_more_than_a_quarter_of_a_core(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert not machine.busy([{"busy_cores": 0.0}, {"busy_cores": 0.25}])
    assert capsys.readouterr().err == ""
    assert machine.busy([{"busy_cores": 0.0}, {"busy_cores": 0.3}])
    assert "marked `busy`" in capsys.readouterr().err


def test_conditions_are_the_load_average_and_the_cores_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (1.26, 9.0, 9.0))
    monkeypatch.setattr(machine.psutil, "cpu_percent", lambda seconds: 30.0)
    assert machine.conditions() == {"load_average": 1.3, "busy_cores": 0.6}


def test_a_spread_is_the_median_the_least_and_the_largest() -> None:
    assert machine.spread([3.0, 1.0, 2.26], 1) == {"median": 2.3, "min": 1.0, "max": 3.0}
