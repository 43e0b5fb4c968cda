"""Warm-up, clipping, the guard against non-finite gradients, and weight decay."""

import pytest
import torch

from app.config.trainer import Optimizer, TrainerConfig
from app.errors import RunError
from app.trainer.optimizer import PolicyOptimizer, UpdateResult


def matrix_and_norm() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.full((2, 3), 2.0)), torch.nn.Parameter(torch.full((3,), 2.0))]


def update(optimizer: PolicyOptimizer, gradient: float, scale: float = 1.0) -> UpdateResult:
    for parameter in optimizer.parameters:
        parameter.grad = torch.full_like(parameter, gradient)
    return optimizer.update(scale=scale)


def test_the_learning_rate_rises_over_the_warm_up_and_stays() -> None:
    optimizer = PolicyOptimizer(matrix_and_norm(), TrainerConfig(lr=0.4, warmup_steps=4))
    assert [update(optimizer, 0.0).lr for _ in range(6)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


def test_a_skipped_update_does_not_move_the_warm_up() -> None:
    optimizer = PolicyOptimizer(matrix_and_norm(), TrainerConfig(lr=0.4, warmup_steps=4))
    assert [update(optimizer, value).lr for value in (0.0, float("nan"), 0.0)] == pytest.approx([0.1, 0.2, 0.2])
    assert optimizer.updates == 2


def test_gradients_are_scaled_then_clipped_to_the_norm() -> None:
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


def test_gradients_within_the_norm_are_not_clipped() -> None:
    parameters = matrix_and_norm()
    optimizer = PolicyOptimizer(
        parameters, TrainerConfig(optimizer=Optimizer.sgd, lr=1.0, weight_decay=0.0, max_grad_norm=100.0)
    )
    update(optimizer, 0.25)
    assert torch.equal(parameters[0].detach(), torch.full((2, 3), 1.75))


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
    optimizer = PolicyOptimizer(matrix_and_norm(), TrainerConfig(max_skipped_updates=2))
    for value in (float("nan"), float("nan"), 0.0, float("nan"), float("nan")):  # a finite one resets the count
        update(optimizer, value)
    with pytest.raises(RunError, match=r"not finite 3 updates in a row, more than trainer\.max_skipped_updates=2"):
        update(optimizer, float("nan"))


@pytest.mark.parametrize("kind", list(Optimizer))
def test_weight_decay_applies_to_matrices_only(kind: Optimizer) -> None:
    matrix, norm = parameters = matrix_and_norm()
    update(PolicyOptimizer(parameters, TrainerConfig(optimizer=kind, lr=0.1, weight_decay=0.5)), 0.0)
    assert torch.allclose(matrix.detach(), torch.tensor(2.0 - 0.1 * 0.5 * 2.0))
    assert bool((norm == 2.0).all())


def test_an_update_without_gradients_changes_nothing_and_is_not_counted() -> None:
    optimizer = PolicyOptimizer(matrix_and_norm(), TrainerConfig(max_skipped_updates=1))
    for _ in range(3):
        result = optimizer.update(scale=1.0)
        assert (result.applied, result.grad_norm) == (False, 0.0)
    assert optimizer.updates == 0
