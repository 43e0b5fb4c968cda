"""Part `exact`: 1 where the completion, stripped of blanks, is the answer; else 0."""

from collections.abc import Sequence

from app.types import Trajectory


def exact(trajectories: Sequence[Trajectory]) -> list[float]:
    """One value, 0 or 1, for each trajectory."""
    return [float(trajectory.text.strip() == trajectory.prompt.answer.strip()) for trajectory in trajectories]
