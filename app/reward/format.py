r"""Part `format`: 1 where the completion marks a final answer, by `\boxed{…}` or `#### …`; else 0."""

from collections.abc import Sequence

from app.reward.answer import extract_final_answer
from app.types import Trajectory


def format(trajectories: Sequence[Trajectory]) -> list[float]:
    """One value, 0 or 1, for each trajectory."""
    return [float(extract_final_answer(trajectory.text) is not None) for trajectory in trajectories]
