"""Reward component `environment`: the score that the environment gave the episode."""

import math
from collections.abc import Sequence

from app.types import Trajectory


def environment(trajectories: Sequence[Trajectory]) -> list[float]:
    """Return the first of each trajectory's scores; NaN, which is a failure, where the environment gave none."""
    return [next(iter(trajectory.scores.values()), math.nan) for trajectory in trajectories]
