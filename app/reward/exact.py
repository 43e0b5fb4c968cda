"""Reward component `exact`: 1 if the completion, stripped of whitespace, equals the answer; else 0."""

from collections.abc import Sequence

from app.types import Trajectory


def exact(trajectories: Sequence[Trajectory]) -> list[float]:
    """Return 0 or 1 per trajectory."""
    return [float(trajectory.text.strip() == trajectory.prompt.answer.strip()) for trajectory in trajectories]
