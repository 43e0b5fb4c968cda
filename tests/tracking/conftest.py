"""Groups and metrics of a plausible run."""

from collections.abc import Callable

import numpy as np
import pytest

from app.types import Completion, FinishReason, Group, Prompt, Trajectory, VersionSpan


def make_group(row: int, rewards: list[float], *, version: int = 0) -> Group:
    prompt = Prompt(f"arithmetic/{row}@0", np.array([row, 1, 2], dtype=np.int32), str(row), "arithmetic")
    trajectories = []
    for index, reward in enumerate(rewards):
        tokens = np.arange(index + 1, dtype=np.int32)
        logprobs = np.full(index + 1, -0.25, dtype=np.float32)
        spans = (VersionSpan(version, 0, index + 1),)
        completion = Completion(tokens, logprobs, FinishReason.stop, spans)
        trajectories.append(Trajectory(prompt, completion, f"text {index}", reward, {"exact": reward}))
    return Group(prompt, tuple(trajectories))


def make_metrics(step: int) -> dict[str, float]:
    return {
        "policy_version": step,
        "reward/mean": 0.1 * step,
        "reward/accuracy": 0.1 * step,
        "tokens/completion": 100,
        "throughput/completion_tokens_per_second": 1234.5,
        "time/step": 1.0,
        "time/generate": 0.6,
        "time/train": 0.3,
        "time/sync": 0.05,
    }


@pytest.fixture
def group() -> Callable[..., Group]:
    return make_group


@pytest.fixture
def metrics() -> Callable[[int], dict[str, float]]:
    return make_metrics
