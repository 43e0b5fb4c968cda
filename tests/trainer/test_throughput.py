"""Throughput metrics: FLOPs against torch's own count, utilization, seconds by phase."""

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from app.config.algorithm import AlgorithmConfig
from app.model.hf_import import transformers
from app.model.load import load
from app.trainer.throughput import ModelFlops, PhaseTimer, throughput_metrics
from tests.model.support import save_qwen3, save_qwen35
from tests.trainer.support import Scenario, make_step, scored_groups, train


@pytest.mark.parametrize("tied", [True, False])
def test_flops_of_a_sequence_match_the_count_of_torch(tied: bool, tmp_path: Path) -> None:
    """Eager attention of transformers computes the masked half of each product too."""
    path, tokens = save_qwen3(tmp_path / "model", tied=tied), 64
    cost = ModelFlops.of(load(path, mesh=None, device="cpu"))
    model = transformers().AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(tokens)[None]).logits.sum().backward()
    masked_half = cost.per_token_squared * tokens * tokens
    assert counter.get_total_flops() == cost.sequence(tokens, tokens) + masked_half
    assert cost.sequence(tokens, 0) + cost.per_completion_token * 5 == cost.sequence(tokens, 5)


def test_only_full_attention_grows_with_the_square_of_the_length(tmp_path: Path) -> None:
    policy = load(save_qwen35(tmp_path / "model"), mesh=None, device="cpu")  # 4 layers, one of them full
    assert ModelFlops.of(policy).per_token_squared == 6 * 1 * 4 * 16


def test_utilization_is_flops_over_the_peak_of_all_devices() -> None:
    metrics = throughput_metrics(
        {"forward": 1.0, "backward": 2.5, "optimizer": 0.5}, tokens=8000, flops=6e14, ranks=2, peak_flops=1e15
    )
    assert metrics["trainer/mfu"] == pytest.approx(6e14 / (4.0 * 2 * 1e15))
    assert metrics["trainer/tokens_per_second"] == 2000
    assert (metrics["time/forward"], metrics["time/backward"], metrics["time/optimizer"]) == (1.0, 2.5, 0.5)


def test_a_device_of_unknown_peak_has_no_utilization() -> None:
    assert "trainer/mfu" not in throughput_metrics({"forward": 1.0}, tokens=1, flops=1, ranks=1, peak_flops=None)


def test_a_step_reports_the_seconds_of_its_phases(tmp_path: Path) -> None:
    scenario = Scenario(AlgorithmConfig(), scored_groups(4))
    step = make_step(save_qwen3(tmp_path / "model"), scenario)
    step.peak_flops = 1e12
    metrics = train(step, scenario).metrics
    seconds = [metrics[f"time/{phase}"] for phase in ("forward", "backward", "optimizer")]
    assert min(seconds) > 0
    assert metrics["trainer/tokens_per_second"] == pytest.approx(metrics["trainer/tokens"] / sum(seconds))
    trained = [each for scored in scenario.groups for each in scored.group.trajectories]
    flops = sum(step.model_flops.sequence(each.tokens, len(each.completion.token_ids)) for each in trained)
    assert metrics["trainer/mfu"] == pytest.approx(flops / (sum(seconds) * 1e12))


def test_a_phase_entered_twice_adds_up() -> None:
    timer = PhaseTimer(torch.device("cpu"))
    for _ in range(2):
        with timer.phase("forward"):
            torch.ones(10).sum()
    once = timer.seconds()["forward"]
    with timer.phase("forward"):
        torch.ones(10).sum()
    assert timer.seconds()["forward"] > once > 0
