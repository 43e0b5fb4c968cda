"""The objectives beside PPO's clip, against the formulas of their papers as plain loops in double precision."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from app.algorithm.custom_functions import require_own
from app.config.algorithm import Aggregation, AlgorithmConfig, Correction, Kl, OldPolicy
from app.config.teacher import TeacherConfig
from tests.refusals import refused

from .cases import random_case, update
from .reference_loss import Case, Tokens, ratios

TermAndSlope = tuple[float, float]  # of one token: its term, and the derivative by its log-probability
MEAN = AlgorithmConfig(aggregation=Aggregation.token_mean, clip_low=0.2, clip_high=0.28)


def cispo(config: AlgorithmConfig, sequence: Tokens, t: int, ratio: float) -> TermAndSlope:
    """sg(clip(r)) · Â · log π, MiniMax-M1 eq. 4 and 5."""
    weight = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
    return weight * sequence.advantage * sequence.logprobs[t], weight * sequence.advantage


def dppo(config: AlgorithmConfig, sequence: Tokens, t: int, ratio: float) -> TermAndSlope:
    """Eq. 13: a token outside of the trust region has neither a term nor a gradient."""
    moved = math.exp(sequence.logprobs[t]) - math.exp(sequence.rollout[t])
    outside = moved > config.clip_high if sequence.advantage > 0 else moved < -config.clip_low
    return (0.0, 0.0) if outside else (ratio * sequence.advantage,) * 2


def sapo(config: AlgorithmConfig, sequence: Tokens, t: int, ratio: float) -> TermAndSlope:
    """4/τ · σ(τ(r − 1)) · Â, whose derivative by log π is 4 · σ · (1 − σ) · r · Â."""
    tau = 1.0 if sequence.advantage > 0 else 1.05
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    return 4 / tau * gate * sequence.advantage, 4 * gate * (1 - gate) * ratio * sequence.advantage


Formula = Callable[[AlgorithmConfig, Tokens, int, float], TermAndSlope]
FORMULAS: dict[str, Formula] = {"cispo": cispo, "dppo": dppo, "sapo": sapo}


def expected(case: Case, config: AlgorithmConfig) -> tuple[float, list[float]]:
    """Loss and gradient of an update with the token mean and no correction."""
    terms, slopes = [], []
    for sequence in case:
        for t, ratio in enumerate(ratios(sequence, config)):
            term, slope = FORMULAS[config.objective](config, sequence, t, ratio)
            terms.append(term * sequence.unmasked)
            slopes.append(-slope * sequence.unmasked / sum(map(len, case)))
    return -math.fsum(terms) / sum(map(len, case)), slopes


@pytest.mark.parametrize("old", OldPolicy)
@pytest.mark.parametrize("objective", FORMULAS)
def test_loss_and_gradient_equal_the_papers(objective: str, old: OldPolicy) -> None:
    config = replace(MEAN, objective=objective, old_policy=old)
    case = random_case(0)
    result = update([case], config, Correction.none)
    loss, gradient = expected(case, config)
    assert result.loss == pytest.approx(loss, rel=1e-12, abs=1e-14)
    assert result.gradient == pytest.approx(gradient, rel=1e-12, abs=1e-14)
    assert any(gradient)


@pytest.mark.parametrize("objective", ["ppo", *FORMULAS])
def test_on_policy_every_objective_has_the_gradient_of_reinforce(objective: str) -> None:
    case = [replace(each, rollout=each.logprobs) for each in random_case(0, on_policy=True, masked=0)]
    result = update([case], replace(MEAN, objective=objective, old_policy=OldPolicy.rollout), Correction.none)
    tokens = sum(map(len, case))
    assert result.gradient == pytest.approx([-each.advantage / tokens for each in case for _ in each.logprobs])


def test_the_clip_fractions_of_dppo_count_the_tokens_without_gradient() -> None:
    case = random_case(1, spread=1.0, masked=0)
    config = replace(MEAN, objective="dppo", old_policy=OldPolicy.rollout)
    result = update([case], config, Correction.none)
    dropped = sum(slope == 0 for slope in result.gradient) / len(result.gradient)
    assert dropped > 0
    assert result.metrics["clip/low_fraction"] + result.metrics["clip/high_fraction"] == pytest.approx(dropped)


MODULE = """
import torch

def half_reinforce(batch, ratio):
    return ratio * batch.advantages[batch.sequence] / 2

def one_number(batch, ratio):
    return ratio.sum()

def constant(batch, ratio):
    return ratio.detach()

def infinite(batch, ratio):
    return ratio / 0

def from_old(batch, ratio):
    return batch.logprobs - batch.old_logprobs

def from_reference(batch, ratio):
    return batch.logprobs - batch.reference_logprobs

def from_teacher(batch, ratio):
    return batch.logprobs - batch.teacher_logprobs

def raising(batch, ratio):
    raise KeyError("no")

def centered(rewards):
    return rewards - rewards.min()

def scalar(rewards):
    return rewards.mean()

def nothing(rewards):
    return rewards * float("nan")
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with functions of a user."""
    name = f"own_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_a_function_of_the_user_is_the_objective(own: str) -> None:
    case = random_case(0)
    half = update([case], replace(MEAN, objective=f"{own}.half_reinforce"), Correction.none)
    unclipped = update([case], replace(MEAN, clip_low=1.0, clip_high=1e9), Correction.none)
    assert half.loss == pytest.approx(unclipped.loss / 2)
    assert half.gradient == pytest.approx([slope / 2 for slope in unclipped.gradient])
    assert half.metrics["clip/low_fraction"] == half.metrics["clip/high_fraction"] == 0


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        *(("objective", name) for name in ("one_number", "constant", "infinite", "raising", "absent")),
        *(("advantage", name) for name in ("scalar", "nothing")),
    ],
)
def test_a_function_that_cannot_be_used_is_refused(setting: str, name: str, own: str) -> None:
    usable = AlgorithmConfig(objective=f"{own}.half_reinforce", advantage=f"{own}.centered")
    require_own(usable, TeacherConfig())
    with refused(f"algorithm.{setting}", f"{own}.{name}"):
        require_own(replace(usable, **{setting: f"{own}.{name}"}), TeacherConfig())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "config", "teacher"),
    [
        ("from_old", AlgorithmConfig(updates_per_step=2), TeacherConfig()),
        ("from_reference", AlgorithmConfig(kl=Kl.k3), TeacherConfig()),
        ("from_teacher", AlgorithmConfig(), TeacherConfig(path="tiny")),
    ],
)
def test_an_objective_is_tried_on_what_the_run_gives_it(
    name: str, config: AlgorithmConfig, teacher: TeacherConfig, own: str
) -> None:
    require_own(replace(config, objective=f"{own}.{name}"), teacher)
    with refused("algorithm.objective", f"{own}.{name}", "NoneType"):
        require_own(AlgorithmConfig(objective=f"{own}.{name}"), TeacherConfig())
