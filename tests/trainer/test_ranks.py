"""Two FSDP2 ranks compute the step of one process, however many calls add the groups and after any aborted step."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.multiprocessing import ProcessRaisedException

from app.algorithm.objective import TokenBatch
from app.config.trainer import TrainerConfig
from tests.model.support import save_qwen3
from tests.trainer.ranks import play_on, run_on
from tests.trainer.support import (
    LIMIT,
    Result,
    Scenario,
    demonstrations,
    make_step,
    parameters,
    play,
    sampled,
    scored_groups,
    train,
)
from tests.trainer.test_step import ALGORITHMS, GRPO, assert_same

TWO_UPDATES = replace(GRPO, updates_per_step=2, clip_low=0.05, clip_high=0.05)
OWN = replace(TWO_UPDATES, objective="tests.trainer.test_ranks.with_old_policy")
ADAM = TrainerConfig(lr=1e-3)
RESETS = hasattr(FSDPModule, "reset_iter_state")  # from torch 2.13
FAILURES = ("failed forward", "failed backward")


def with_old_policy(batch: TokenBatch, ratio: Tensor) -> Tensor:
    """An objective of the user's that needs the old policy on every rank."""
    return ratio * batch.token_advantages - (batch.logprobs - batch.old_logprobs) ** 2  # type: ignore[operator]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3(tmp_path_factory.mktemp("policy"), tied=False)


@pytest.fixture(scope="module")
def scenarios(path: Path, reference: Path) -> dict[str, Scenario]:
    groups = sampled(path, scored_groups(8))
    masked, with_reference = (ALGORITHMS[name][0] for name in ("dapo masked", "kl and entropy"))
    three = sampled(path, scored_groups(1, size=3, seed=5, shortest=2))
    return {
        "masked, in 7 pieces": Scenario(masked, groups, pieces=7, budget=15),
        "with a reference": Scenario(with_reference, groups, reference=reference),
        "two updates in 3 pieces": Scenario(TWO_UPDATES, groups, pieces=3),
        "three trajectories": Scenario(GRPO, three, budget=1),
        "own objective beside dummies": Scenario(OWN, three, budget=1),
        "no groups": Scenario(TWO_UPDATES, []),
        "alone": Scenario(GRPO, groups, trainer=ADAM),
        "abort": Scenario(GRPO, groups, trainer=ADAM, before="abort"),
        **{each: Scenario(GRPO, groups, trainer=ADAM, before=each) for each in FAILURES},
    }


@pytest.fixture(scope="module")
def on_two_ranks(
    path: Path, scenarios: dict[str, Scenario], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Result]:
    played = {name: each for name, each in scenarios.items() if RESETS or name not in FAILURES}
    return play_on(2, path, played, tmp_path_factory.mktemp("ranks") / "results.pt")


@pytest.mark.parametrize(
    "name",
    [
        "masked, in 7 pieces",
        "with a reference",
        "two updates in 3 pieces",
        "three trajectories",
        "own objective beside dummies",
    ],
)
def test_two_ranks_compute_the_step_of_one(
    name: str, path: Path, scenarios: dict[str, Scenario], on_two_ranks: dict[str, Result]
) -> None:
    assert_same(on_two_ranks[name], play(path, scenarios[name]))


@pytest.mark.parametrize("before", ["abort", *(FAILURES if RESETS else ())])
def test_abort_then_step_equals_step_alone(before: str, on_two_ranks: dict[str, Result]) -> None:
    for name, parameter in on_two_ranks["alone"].after.items():
        assert torch.equal(on_two_ranks[before].after[name], parameter), name
        assert not torch.equal(parameter, on_two_ranks["alone"].before[name]), name


@pytest.mark.skipif(RESETS, reason="this torch resets FSDP2 after a failed pass")
@pytest.mark.parametrize("before", FAILURES)
def test_a_torch_that_cannot_reset_fsdp_refuses_to_continue_after_a_failed_pass(
    before: str, path: Path, scenarios: dict[str, Scenario], tmp_path: Path
) -> None:
    with pytest.raises(ProcessRaisedException, match=r"TrainerError: .* reset"):
        play_on(2, path, {before: scenarios[before]}, tmp_path / "results.pt")


def test_a_rank_without_a_trajectory_computes_a_dummy_pass(on_two_ranks: dict[str, Result]) -> None:
    """Three trajectories above the budget take two passes, with one dummy among the four microbatches."""
    metrics = on_two_ranks["three trajectories"].metrics
    padding = metrics["trainer/padding_fraction"]
    assert padding == pytest.approx(2 / (metrics["trainer/tokens"] + 2))  # a dummy has two tokens


def test_two_ranks_step_without_groups(on_two_ranks: dict[str, Result]) -> None:
    result = on_two_ranks["no groups"]
    assert (result.updates, result.metrics["grad_norm"], result.metrics["loss/policy"]) == (0, 0.0, 0.0)


def probed(mesh: DeviceMesh, path: Path, scenario: Scenario) -> list[dict[str, Tensor]]:
    """The parameters after two steps, without and with log-probabilities computed just before the first one's end."""
    after = []
    for asked in (False, True):
        step = make_step(path, scenario, mesh)
        step.begin(1)
        step.add_groups(scenario.groups)
        assert not step._pending  # so that no pass with gradients comes between
        if asked:
            step.logprobs(demonstrations(3))
        step.finish()
        train(step, scenario, version=2)
        after.append(parameters(step.model))
    return after


def test_log_probabilities_before_an_update_leave_no_weights_for_the_next_step(path: Path, tmp_path: Path) -> None:
    """As a probe of the engines computes them. FSDP2 keeps a head that it gathered for a forward alone."""
    (scored,) = sampled(path, scored_groups(1, seed=5, shortest=LIMIT))
    alike = replace(scored.group, trajectories=scored.group.trajectories[:1] * 4)
    scenario = Scenario(GRPO, [replace(scored, group=alike)], trainer=ADAM, budget=1)
    without, asked = run_on(2, probed, tmp_path / "results.pt", path, scenario)
    assert without.keys() == asked.keys()
    assert [name for name, parameter in without.items() if not torch.equal(parameter, asked[name])] == []
