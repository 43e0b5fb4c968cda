"""Groups and metrics of a plausible run, and its recording."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from app.config import RunConfig
from app.tracking.recorder import RunFolderRecorder
from app.types import (
    Completion,
    Ending,
    Episode,
    FinishReason,
    Group,
    Prompt,
    TokenSequence,
    Trajectory,
    Turn,
    VersionSpan,
)

SPAN = VersionSpan(3, 0, 3)


def group(row: int, rewards: list[float], *, version: int = 0) -> Group:
    prompt = Prompt(f"arithmetic/{row}@0", np.array([row, 1, 2], dtype=np.int32), str(row), "arithmetic")
    trajectories = []
    for index, reward in enumerate(rewards):
        tokens = np.arange(index + 1, dtype=np.int32)
        logprobs = np.full(index + 1, -0.25, dtype=np.float32)
        spans = (VersionSpan(version, 0, index + 1),)
        completion = Completion(tokens, logprobs, FinishReason.stop, spans)
        trajectories.append(Trajectory(prompt, completion, f"text {index}", reward, {"exact": reward}))
    return Group(prompt, tuple(trajectories))


def episode_group() -> Group:
    """Two episodes: one of two turns, and one whose history was rewritten."""
    prompt = Prompt("game/3@0", np.array([7, 8], dtype=np.int32), "42", "game", "6*7=")
    two = (
        Turn("user", "6*7=", 2, 0.0),
        Turn("assistant", "<b>41</b>", 2, 1.25),
        Turn("tool", "wrong", 1, 0.002),
        Turn("assistant", "42", 1, 0.5),
    )
    sampled = np.array([0, 0, 1, 1, 0, 1], dtype=bool)
    sequence = TokenSequence(np.arange(6, dtype=np.int32), sampled, np.array([-0.5, -0.25, -0.75], np.float32), (SPAN,))
    scores = {"found": 1.0, "polite": float("nan")}
    first = Episode((sequence,), two, Ending.stop, scores, {"turns": 2.0, "sequences": 1.0})
    second = Episode((sequence, sequence), two[:2], Ending.turns, {"found": 0.0}, {"turns": 2.0, "sequences": 2.0})
    last = Completion(
        np.array([5], np.int32), np.array([-0.75], np.float32), FinishReason.stop, (VersionSpan(3, 0, 1),)
    )
    trajectories = [
        Trajectory(prompt, last, "42", reward, {"environment": reward}, episode)
        for reward, episode in ((1.0, first), (0.0, second))
    ]
    return Group(prompt, tuple(trajectories))


def metrics(step: int) -> dict[str, float]:
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


def offline(*use: str, steps: int = 3) -> RunConfig:
    """A run with these trackers, which reach no server."""
    config = RunConfig(steps=steps)
    config.tracking.use = list(use)
    config.tracking.offline = True
    return config


def record(config: RunConfig, folder: Path, steps: Sequence[int], resumed_at: int | None = None) -> None:
    with RunFolderRecorder(config, folder) as recorder:
        if resumed_at is not None:
            recorder.resume(resumed_at)
        else:
            recorder.log_eval(0, {"eval": {"accuracy": 0.25}})
        for step in steps:
            recorder.log(step, {**metrics(step), "lr": 0.5})
