r"""Reward component `format`: 1 if the completion marks a final answer with `\boxed{…}` or `#### …`; else 0."""

from collections.abc import Sequence

from app.reward.answer import extract_final_answer
from app.types import Trajectory


def format(trajectories: Sequence[Trajectory]) -> list[float]:
    """Return 0 or 1 per trajectory."""
    return [float(extract_final_answer(trajectory.text) is not None) for trajectory in trajectories]
