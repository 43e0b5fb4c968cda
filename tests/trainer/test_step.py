"""The split step in one process: its lifecycle, and its numbers against a reference without the application."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from app.config.algorithm import Aggregation, AlgorithmConfig, Correction, Kl, OldPolicy, RatioLevel
from app.config.trainer import TrainerConfig
from app.errors import RunError, TrainerError
from app.trainer import optimizer
from app.trainer.microbatch import make_samples
from app.types import Group, ScoredGroup, VersionSpan
from tests.model.support import relative
from tests.trainer import plain
from tests.trainer.support import SGD, TEMPERATURE, Result, Scenario, make_step, parameters, play, train

GRPO = AlgorithmConfig(prompts_per_step=8, group_size=4)
DAPO = replace(GRPO, aggregation=Aggregation.token_mean, clip_high=0.28, old_policy=OldPolicy.rollout)
ALGORITHMS = {
    "grpo": (GRPO, Correction.none),
    "dapo against the rollout policy": (DAPO, Correction.none),
    "dapo masked": (replace(DAPO, mask_truncated=True), Correction.none),
    "dr_grpo": (replace(GRPO, aggregation=Aggregation.seq_mean_token_sum_norm), Correction.none),
    "sums with tis": (replace(GRPO, aggregation=Aggregation.seq_mean_token_sum, correction_high=1.1), Correction.tis),
    "gspo": (replace(GRPO, ratio=RatioLevel.sequence, old_policy=OldPolicy.rollout, clip_low=0.02), Correction.none),
    "kl and entropy": (replace(GRPO, kl=Kl.k3, kl_coefficient=0.1, entropy_coefficient=0.01), Correction.none),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_loss_and_gradients_match_transformers_one_trajectory_at_a_time(
    name: str, path: Path, reference: Path, groups: list[ScoredGroup]
) -> None:
    algorithm, correction = ALGORITHMS[name]
    frozen = reference if algorithm.needs_reference else None
    ours = play(path, Scenario(algorithm, groups, correction, reference=frozen))
    model = plain.transformers_model(path)
    loss = plain.loss(model, groups, algorithm, correction, reference=frozen and plain.transformers_model(frozen))
    plain.assert_step(ours, model, loss)


def test_on_policy_tokens_have_a_mismatch_of_their_own(path: Path, groups: list[ScoredGroup]) -> None:
    """A step that begins with policy 4 counts the tokens that policy 4 sampled, in sequences that others began."""
    spanned = [replace(each, group=with_spans(each.group, stale=index % 3)) for index, each in enumerate(groups)]
    scenario = Scenario(GRPO, spanned)
    metrics = train(make_step(path, scenario), scenario, version=5).metrics
    model = plain.transformers_model(path)
    differences = []
    with torch.no_grad():
        for scored in spanned:
            for trajectory in scored.group.trajectories:
                logs, _ = plain.token_logprobs(model, trajectory, TEMPERATURE)
                difference = logs - torch.as_tensor(trajectory.completion.logprobs).double()
                differences.append(difference[trajectory.completion.spans[0].end :])
    on_policy = torch.cat(differences)
    kl = (on_policy.exp() - on_policy - 1).mean().item()
    assert metrics["mismatch/kl_same_version"] == pytest.approx(kl, rel=1e-4)
    assert metrics["mismatch/kl"] != pytest.approx(kl, rel=0.01)

    assert "mismatch/kl_same_version" not in train(make_step(path, scenario), scenario, version=7).metrics


def with_spans(group: Group, *, stale: int) -> Group:
    """Let policy 3 have sampled the first `stale` tokens of each completion, and policy 4 the others."""

    def spans(length: int) -> tuple[VersionSpan, ...]:
        first = min(stale, length)
        return VersionSpan(3, 0, first), VersionSpan(4, first, length)

    members = [
        replace(each, completion=replace(each.completion, spans=spans(len(each.completion.token_ids))))
        for each in group.trajectories
    ]
    return replace(group, trajectories=tuple(members))


def test_against_the_rollout_policy_the_mismatch_is_that_of_the_first_update(
    path: Path, groups: list[ScoredGroup]
) -> None:
    """There is no pass for the trainer's π_old then, and later updates have moved the policy."""
    moving = replace(DAPO, updates_per_step=2)
    both = play(path, Scenario(moving, groups)).metrics
    first = play(path, Scenario(DAPO, groups[:4])).metrics
    names = [name for name in first if name.startswith("mismatch/")]
    assert len(names) == 6
    assert {name: both[name] for name in names} == pytest.approx({name: first[name] for name in names}, rel=1e-5)
    assert both["kl/old"] > 2 * first["kl/old"]  # the second half, against the same rollout policy


@pytest.mark.parametrize(("pieces", "budget"), [(1, 1), (2, 100_000), (7, 40)])
def test_pieces_and_budget_do_not_change_the_step(
    pieces: int, budget: int, path: Path, groups: list[ScoredGroup]
) -> None:
    whole = play(path, Scenario(DAPO, groups))
    assert_same(play(path, Scenario(DAPO, groups, pieces=pieces, budget=budget)), whole)


def test_add_groups_computes_the_microbatches_that_are_full(path: Path, groups: list[ScoredGroup]) -> None:
    tokens = sum(each.tokens for each in make_samples(groups[:4], mask_truncated=False))
    step = make_step(path, Scenario(GRPO, groups, budget=tokens))
    step.begin(1)
    step.add_groups(groups[:2])
    assert all(parameter.grad is None for parameter in step.model.parameters())
    step.add_groups(groups[2:4])
    early = {name: parameter.grad for name, parameter in step.model.named_parameters()}
    assert all(gradient is not None and gradient.abs().max() > 0 for gradient in early.values())
    step.finish()


@pytest.mark.parametrize(
    ("before", "updates"), [("abort", 1), ("abort", 2), ("failed forward", 1), ("failed backward", 1)]
)
def test_abort_then_step_equals_step_alone(before: str, updates: int, path: Path, groups: list[ScoredGroup]) -> None:
    algorithm = replace(GRPO, updates_per_step=updates)
    scenario = Scenario(algorithm, groups, trainer=TrainerConfig(lr=1e-3))
    alone, after = play(path, scenario), play(path, replace(scenario, before=before))
    for name, parameter in alone.after.items():
        assert torch.equal(after.after[name], parameter), name
        assert not torch.equal(parameter, alone.before[name]), name
    timings = ("time/", "trainer/tokens_per_second")
    assert {k: v for k, v in after.metrics.items() if not k.startswith(timings)} == {
        k: v for k, v in alone.metrics.items() if not k.startswith(timings)
    }


def test_two_updates_take_their_ratios_against_the_policy_at_the_start_of_the_step(
    path: Path, groups: list[ScoredGroup]
) -> None:
    algorithm = replace(GRPO, updates_per_step=2, clip_low=0.05, clip_high=0.05)
    ours = play(path, Scenario(algorithm, groups))
    model = plain.transformers_model(path)
    with torch.no_grad():
        old = {
            (scored.group.prompt.id, member): plain.token_logprobs(model, trajectory, TEMPERATURE)[0]
            for scored in groups
            for member, trajectory in enumerate(scored.group.trajectories)
        }
    assert ours.updates == len(ours.gradients) == 2
    for update, half in enumerate((groups[:4], groups[4:])):
        model.zero_grad()
        plain.loss(model, half, algorithm, Correction.none, old=old).backward()
        for name, parameter in model.named_parameters():
            assert relative(ours.gradients[update][name], parameter.grad) < 1e-5, (update, name)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= SGD.lr * parameter.grad
    for name, parameter in model.named_parameters():
        assert relative(ours.after[name], parameter.detach()) < 1e-6, name
    assert ours.metrics["ratio/max"] > 1.05
    assert ours.metrics["clip/high_fraction"] > 0


def test_the_gradient_norm_covers_all_updates_of_a_step(path: Path, groups: list[ScoredGroup]) -> None:
    result = play(path, Scenario(replace(GRPO, updates_per_step=4), groups))
    norms = [torch.stack([each.norm() for each in gradients.values()]).norm().item() for gradients in result.gradients]
    assert len(norms) == 4
    assert result.metrics["grad_norm"] == pytest.approx(sum(norms) / 4, rel=1e-5)
    assert result.metrics["grad_norm/max"] == pytest.approx(max(norms), rel=1e-5)


def test_an_update_without_finite_gradients_before_a_finite_one_is_counted(
    path: Path, groups: list[ScoredGroup]
) -> None:
    broken = [replace(groups[0], advantages=groups[0].advantages * float("nan")), *groups[1:]]
    halves = replace(GRPO, updates_per_step=2)
    result = play(path, Scenario(halves, broken))
    assert (result.updates, result.metrics["updates/skipped"]) == (1, 1.0)
    second = torch.stack([each.norm() for each in result.gradients[1].values()]).norm().item()
    assert result.metrics["grad_norm"] == result.metrics["grad_norm/max"] == pytest.approx(second, rel=1e-5)


@pytest.mark.parametrize("updates", [1, 2])
def test_parameters_that_no_update_has_changed_keep_their_version(
    updates: int, path: Path, groups: list[ScoredGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the last step of a run that non-finite gradients end could not be saved."""
    broken = [replace(each, advantages=each.advantages * float("nan")) for each in groups]
    monkeypatch.setattr(optimizer, "MAX_SKIPPED_UPDATES", updates)
    scenario = Scenario(replace(GRPO, updates_per_step=updates), broken, trainer=TrainerConfig(lr=1e-3))
    step = make_step(path, scenario)
    before = parameters(step.model)
    train(step, scenario, version=1)
    assert step.version == 1
    with pytest.raises(RunError, match="not finite"):
        train(step, scenario, version=2)
    step.abort()
    assert step.version == 1
    assert all(torch.equal(value, before[name]) for name, value in parameters(step.model).items())


def test_a_step_without_groups_changes_nothing_and_reports_zeros(path: Path) -> None:
    result = play(path, Scenario(replace(GRPO, updates_per_step=2), []))
    assert result.updates == 0
    assert all(torch.equal(result.after[name], before) for name, before in result.before.items())
    assert {result.metrics[name] for name in ("loss/policy", "grad_norm", "entropy", "mismatch/kl")} == {0.0}
    assert result.metrics["lr"] == SGD.lr


def test_a_closed_step_refuses_all_but_begin_and_abort_and_an_open_one_to_begin(
    path: Path, groups: list[ScoredGroup]
) -> None:
    step = make_step(path, Scenario(GRPO, groups))
    calls: list[Callable[[], object]] = [
        lambda: step.add_groups(groups),
        lambda: step.old_logprobs(groups),
        lambda: step.add_demonstrations([]),
        step.finish,
    ]
    for close in (step.abort, lambda: train(step, Scenario(GRPO, groups))):
        close()
        for call in calls:
            with pytest.raises(TrainerError, match="without an open step"):
                call()
    step.begin(4)
    with pytest.raises(TrainerError, match=r"begin_step\(5\) .*version 4"):
        step.begin(5)


def assert_same(one: Result, other: Result, *, skip: tuple[str, ...] = ()) -> None:
    """Loss metrics, gradients and their norm to 1e-5, parameters after the SGD step."""
    for name, value in other.metrics.items():
        if not name.startswith(("time/", "trainer/", *skip)):
            assert one.metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert len(one.gradients) == len(other.gradients)
    for ours, theirs in zip(one.gradients, other.gradients, strict=True):
        for name, gradient in theirs.items():
            assert relative(ours[name], gradient) < 1e-5, name
    for name, parameter in other.after.items():
        assert relative(one.after[name], parameter) < 1e-6, name
