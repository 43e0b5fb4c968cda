"""Overlong completions (DAPO): the soft punishment by length, and the filter for truncated ones."""

import numpy as np

from app.config.algorithm import AlgorithmConfig
from app.types import Group, Trajectory


def shaped_rewards(group: Group, config: AlgorithmConfig, *, max_completion_tokens: int) -> np.ndarray:
    """Return raw rewards plus the overlong punishment of each trajectory: [G] float64, a new array."""
    buffer = config.overlong_buffer_tokens(max_completion_tokens)
    punishments = [
        overlong_punishment(trajectory.response_tokens, limit=max_completion_tokens, buffer=buffer)
        for trajectory in group.trajectories
    ]
    return group.rewards + config.overlong_penalty * np.array(punishments, dtype=np.float64)


def overlong_punishment(tokens: int, *, limit: int, buffer: int) -> float:
    """Soft overlong punishment (DAPO, arXiv 2503.14476, eq. 13): 0 up to `limit − buffer` tokens, −1 at `limit`.

    >>> [overlong_punishment(tokens, limit=16, buffer=4) for tokens in (12, 13, 16, 17)]
    [0.0, -0.25, -1.0, -1.0]
    """
    excess = tokens - (limit - buffer)
    if buffer == 0 or excess <= 0:
        return 0.0
    return -min(excess / buffer, 1.0)


def contributes_gradient(trajectory: Trajectory, *, mask_truncated: bool) -> bool:
    """False for a truncated trajectory under `mask_truncated` (DAPO's overlong filtering, section 3.4)."""
    return not (mask_truncated and trajectory.truncated)
