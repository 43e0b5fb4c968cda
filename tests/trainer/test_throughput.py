"""Throughput metrics: FLOPs against torch's own count, utilization, seconds by phase."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from app.config.algorithm import AlgorithmConfig, Kl
from app.config.model import LoraConfig
from app.device.torchvision_shim import transformers
from app.model.load import load
from app.model.lora.layer import adapters_off, add_adapters, initialize
from app.model.policy import PolicyModel
from app.trainer.step import TrainStep
from app.trainer.throughput import ModelFlops, throughput_metrics
from tests.model.support import save_qwen3
from tests.trainer.support import Scenario, make_step, scored_groups, train


@pytest.mark.parametrize("tied", [True, False])
def test_flops_of_a_sequence_match_the_count_of_torch(tied: bool, tmp_path: Path) -> None:
    """Eager attention of transformers computes the masked half of each product too."""
    path, tokens = save_qwen3(tmp_path / "model", tied=tied), 64
    cost = ModelFlops.of(load(path, mesh=None, device="cpu"))
    model = transformers().AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(tokens)[None]).logits.sum().backward()
    masked_half = cost.step.per_token_squared * tokens * tokens
    assert counter.get_total_flops() == cost.step.of([tokens], tokens) + masked_half
    assert cost.step.of([tokens], 0) + cost.step.per_completion_token * 5 == cost.step.of([tokens], 5)


def test_a_frozen_base_needs_no_gradients_of_its_weights(path: Path) -> None:
    """Counted by torch on transformers' model with the same adapters.

    Of the first layer torch also leaves out the gradients of its input, which nothing needs.
    """
    tokens, lora = 64, LoraConfig(rank=4)
    policy = load(path, mesh=None, device="cpu", lora=lora)
    cost, base = ModelFlops.of(policy), ModelFlops.of(policy, adapters=False)
    model = transformers().AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    add_adapters(model, lora)
    initialize(model, seed=0)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(tokens)[None]).logits.sum().backward()
    masked_half = cost.step.per_token_squared * tokens * tokens
    attention: Any = policy.layers[0].self_attn
    first = [attention.q_proj, attention.k_proj, attention.v_proj]
    left_out = sum(2 * tokens * (layer.weight.numel() + layer.lora_A.numel()) for layer in first)
    assert counter.get_total_flops() == cost.step.of([tokens], tokens) + masked_half - left_out

    with FlopCounterMode(display=False) as counter, adapters_off(model), torch.no_grad():
        model(input_ids=torch.arange(tokens)[None])
    assert counter.get_total_flops() == base.forward.of([tokens], tokens) + masked_half / 3
    everything = ModelFlops.of(load(path, mesh=None, device="cpu"))
    assert base.forward.of([tokens], 5) == everything.forward.of([tokens], 5)


def test_utilization_is_flops_over_the_peak_of_all_devices() -> None:
    metrics = throughput_metrics(
        {"forward": 1.0, "backward": 2.5, "optimizer": 0.5}, tokens=8000, flops=6e14, ranks=2, peak_flops=1e15
    )
    assert metrics["trainer/mfu"] == pytest.approx(6e14 / (4.0 * 2 * 1e15))
    assert metrics["trainer/tokens_per_second"] == 2000
    assert (metrics["time/forward"], metrics["time/backward"], metrics["time/optimizer"]) == (1.0, 2.5, 0.5)
    # Of a device whose peak is not known there is none.
    assert "trainer/mfu" not in throughput_metrics({"forward": 1.0}, tokens=1, flops=1, ranks=1, peak_flops=None)


class WorkClock:
    """A clock that only the work of a step moves: 1 s per forward, 2 s per backward, 4 s per update."""

    def __init__(self, step: TrainStep, reference: PolicyModel | None) -> None:
        self.now = 0.0
        for model in (step.model, reference):
            if model is not None:
                model.register_forward_hook(lambda *_: self.advance(1.0))
        step.model.layers[0].register_full_backward_hook(lambda *_: self.advance(2.0))
        step.optimizer.torch_optimizer.register_step_post_hook(lambda *_: self.advance(4.0))

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("updates", "kl"), [(1, Kl.none), (4, Kl.k2)])
def test_the_seconds_of_the_phases_sum_to_those_of_the_step(
    updates: int, kl: Kl, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = AlgorithmConfig(prompts_per_step=8, group_size=4, updates_per_step=updates, kl=kl)
    scenario = Scenario(algorithm, scored_groups(8), reference=path if algorithm.needs_reference else None)
    step = make_step(path, scenario)
    step.peak_flops = 1e9
    clock = WorkClock(step, step.reference)
    monkeypatch.setattr("app.utils.phase_timer.perf_counter", clock)

    metrics = train(step, scenario).metrics
    seconds = {name: value for name, value in metrics.items() if name.startswith("time/")}
    longest = seconds.pop("time/microbatch_max")  # a part of the phases
    assert 0 < longest <= seconds["time/forward"] + seconds["time/backward"]
    assert sum(seconds.values()) == clock.now
    assert ("time/old_logprobs" in seconds) == (updates > 1)
    assert seconds["time/optimizer"] == 4 * updates
    assert metrics["trainer/tokens_per_second"] == metrics["trainer/tokens"] / clock.now

    trained = [each for scored in scenario.groups for each in scored.group.trajectories]
    sampled = sum(len(each.completion.token_ids) for each in trained)
    shared = round(metrics["trainer/shared_fraction"] * metrics["trainer/tokens"])
    assert 0 < shared <= sum(3 * (len(scored.group.prompt.token_ids) - 1) for scored in scenario.groups)
    cost = step.model_flops.step
    training = cost.of([each.tokens for each in trained], sampled) - cost.per_token * shared
    forwards = (updates > 1) + (kl is not Kl.none)
    assert metrics["trainer/mfu"] == pytest.approx(training * (1 + forwards / 3) / (clock.now * 1e9))
