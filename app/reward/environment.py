"""Reward component `environment`: the score that the environment gave the episode."""

from collections.abc import Sequence

from app.types import Trajectory


class NoScore(Exception):
    """The environment gave the episode no score."""


def environment(trajectories: Sequence[Trajectory]) -> list[float | NoScore]:
    """Return the first of each trajectory's scores; `NoScore`, which is a failure, where the environment gave none."""
    missing = NoScore("its run or score returned none")
    return [next(iter(trajectory.scores.values()), missing) for trajectory in trajectories]
