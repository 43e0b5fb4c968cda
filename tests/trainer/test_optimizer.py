"""Learning-rate schedules, clipping, the guard against non-finite gradients, and weight decay."""

from typing import Any

import pytest
import torch

from app.config.trainer import Optimizer, Schedule, TrainerConfig
from app.device.torchvision_shim import transformers
from app.errors import RunError
from app.trainer.optimizer import PolicyOptimizer, UpdateResult, learning_rate, update_metrics


def matrix_and_norm() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.full((2, 3), 2.0)), torch.nn.Parameter(torch.full((3,), 2.0))]


def update(optimizer: PolicyOptimizer, gradient: float, scale: float = 1.0) -> UpdateResult:
    for parameter in optimizer.parameters:
        parameter.grad = torch.full_like(parameter, gradient)
    return optimizer.update(scale=scale)


def test_the_learning_rate_rises_over_the_warm_up_and_stays_which_a_skipped_update_does_not_move() -> None:
    optimizer = PolicyOptimizer(matrix_and_norm(), TrainerConfig(lr=0.4, warmup_steps=4))
    gradients = [0.0, float("nan"), 0.0, 0.0, 0.0, 0.0]
    assert [update(optimizer, each).lr for each in gradients] == pytest.approx([0.1, 0.2, 0.2, 0.3, 0.4, 0.4])
    assert optimizer.updates == 5


def test_the_scale_is_a_factor_of_the_whole_schedule() -> None:
    scaled = rates(9, lr=0.2, lr_scale=3.0, warmup_steps=2, schedule=Schedule.cosine, lr_min_fraction=0.1)
    assert scaled == pytest.approx(rates(9, lr=0.6, warmup_steps=2, schedule=Schedule.cosine, lr_min_fraction=0.1))
    optimizer = PolicyOptimizer(matrix_and_norm(), TrainerConfig(lr=0.2, lr_scale=3.0, optimizer=Optimizer.sgd))
    assert update(optimizer, 0.0).lr == pytest.approx(0.6)


def rates(run_updates: int, **settings: Any) -> list[float]:
    config = TrainerConfig(**settings)
    return [learning_rate(config, update, run_updates=run_updates) for update in range(run_updates)]


def theirs(schedule: Any, updates: int) -> list[float]:
    """The learning rate of each update under a scheduler `schedule(optimizer)` of torch or transformers."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    scheduler = schedule(optimizer)
    found = []
    for _ in range(updates):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("warmup", [0, 4])
def test_the_decays_equal_those_of_transformers(warmup: int) -> None:
    """Their warm-up starts at 0, ours at the first step above it; the decays are the same."""
    package = transformers().optimization
    linear = theirs(lambda each: package.get_linear_schedule_with_warmup(each, warmup, 20), 20)
    cosine = theirs(lambda each: package.get_cosine_schedule_with_warmup(each, warmup, 20), 20)
    floored = theirs(
        lambda each: package.get_cosine_with_min_lr_schedule_with_warmup(each, warmup, 20, min_lr_rate=0.1), 20
    )
    ours = {"lr": 0.4, "warmup_steps": warmup}
    assert rates(20, **ours, schedule=Schedule.linear)[warmup:] == pytest.approx(linear[warmup:])
    assert rates(20, **ours, schedule=Schedule.cosine)[warmup:] == pytest.approx(cosine[warmup:])
    found = rates(20, **ours, schedule=Schedule.cosine, lr_min_fraction=0.1)
    assert found[warmup:] == pytest.approx(floored[warmup:])
    assert found[: max(0, warmup - 1)] == pytest.approx(floored[1:warmup])


def test_a_warm_up_longer_than_the_run_never_decays_and_a_linear_decay_keeps_its_floor() -> None:
    assert rates(3, lr=0.4, warmup_steps=4, schedule=Schedule.cosine) == pytest.approx([0.1, 0.2, 0.3])
    config = TrainerConfig(lr=0.4, schedule=Schedule.linear, lr_min_fraction=0.25)
    assert [learning_rate(config, at, run_updates=10) for at in (0, 5, 12)] == pytest.approx([0.4, 0.25, 0.1])


def test_a_resumed_decay_goes_on_and_stretches_to_more_steps() -> None:
    config = TrainerConfig(lr=0.4, schedule=Schedule.linear)
    first = PolicyOptimizer(matrix_and_norm(), config, run_updates=10)
    assert [update(first, 0.0).lr for _ in range(4)] == pytest.approx([0.4, 0.36, 0.32, 0.28])

    for run_updates, expected in ((10, 0.24), (16, 0.3)):
        resumed = PolicyOptimizer(matrix_and_norm(), config, run_updates=run_updates)
        resumed.restore({}, updates=first.updates, skipped_in_a_row=0)
        assert update(resumed, 0.0).lr == pytest.approx(expected)


def test_the_change_of_an_update_is_relative_to_the_weights() -> None:
    """Of SGD on weights of 2 half of lr · gradient; a rate that float32 cannot add changes nothing."""
    sgd = TrainerConfig(optimizer=Optimizer.sgd, lr=0.01, weight_decay=0.0)
    moved = update(PolicyOptimizer(matrix_and_norm(), sgd), 0.25)
    change = update_metrics([moved])["updates/relative_change"]
    assert change == pytest.approx(0.01 * 0.25 / 2, rel=1e-4)
    still = update(PolicyOptimizer(matrix_and_norm(), TrainerConfig(lr=1e-12, weight_decay=0.0)), 0.25)
    assert (still.applied, update_metrics([still])["updates/relative_change"]) == (True, 0.0)


def test_gradients_are_scaled_and_those_above_the_norm_are_clipped_to_it() -> None:
    parameters = matrix_and_norm()
    optimizer = PolicyOptimizer(
        parameters, TrainerConfig(optimizer=Optimizer.sgd, lr=1.0, weight_decay=0.0, max_grad_norm=1.5)
    )
    result = update(optimizer, 4.0, scale=0.5)  # nine times 2.0
    assert (result.applied, result.lr) == (True, 1.0)
    assert result.grad_norm == pytest.approx(6.0)
    moved = torch.cat([(2.0 - parameter.detach()).flatten() for parameter in parameters])
    assert moved.norm().item() == pytest.approx(1.5)
    assert moved.tolist() == pytest.approx([0.5] * 9)
    update(optimizer, 0.25)  # within the norm
    assert torch.equal(parameters[0].detach(), torch.full((2, 3), 1.25))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_a_non_finite_gradient_changes_nothing(value: float) -> None:
    parameters = matrix_and_norm()
    optimizer = PolicyOptimizer(parameters, TrainerConfig(lr=0.1))
    result = update(optimizer, value, scale=1e20)
    assert not result.applied
    assert all(parameter.grad is None for parameter in parameters)
    assert all(bool((parameter == 2.0).all()) for parameter in parameters)
    assert not optimizer.torch_optimizer.state


def test_too_many_skipped_updates_in_a_row_end_the_run() -> None:
    optimizer = PolicyOptimizer(matrix_and_norm(), TrainerConfig())
    for value in (*[float("nan")] * 3, 0.0, *[float("nan")] * 3):  # a finite one resets the count
        update(optimizer, value)
        optimizer.require_updates()
    update(optimizer, float("nan"))
    with pytest.raises(RunError, match="4 updates in a row"):
        optimizer.require_updates()


@pytest.mark.parametrize("kind", list(Optimizer))
def test_weight_decay_applies_to_matrices_only(kind: Optimizer) -> None:
    matrix, norm = parameters = matrix_and_norm()
    update(PolicyOptimizer(parameters, TrainerConfig(optimizer=kind, lr=0.1, weight_decay=0.5)), 0.0)
    assert torch.allclose(matrix.detach(), torch.tensor(2.0 - 0.1 * 0.5 * 2.0))
    assert bool((norm == 2.0).all())
