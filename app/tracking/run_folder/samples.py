"""`samples/step_N.jsonl`: some trajectories of each step, as they were trained on, for people to read.

The choice does not look at rewards: prompts are taken evenly over the step's groups, one trajectory of each first, so
what one reads is what the policy does, not its best or its worst.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from app.types import Group, Trajectory

FOLDER = "samples"
Decode = Callable[[Sequence[int]], str]  # token ids → text


def write_samples(
    folder: Path, step: int, groups: Sequence[Group], count: int, decode: Decode | None = None, *, kind: str = "step"
) -> Path | None:
    """Write `count` trajectories (fewer if there are no more); None where that is none. `decode` gives the question.

    `kind` is `step` for what was trained on, `eval` for what an evaluation after that step sampled.
    """
    chosen = choose(groups, count)
    if not chosen:
        return None
    path = sample_path(folder, step, kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row(trajectory, decode), ensure_ascii=False) + "\n" for trajectory in chosen]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def choose(groups: Sequence[Group], count: int) -> list[Trajectory]:
    """The first trajectory of groups that lie evenly over the step, then their second ones, and so on."""
    if not groups or count <= 0:
        return []
    spread = [groups[index * len(groups) // min(count, len(groups))] for index in range(min(count, len(groups)))]
    longest = max(len(group.trajectories) for group in spread)
    turns = (group.trajectories[turn] for turn in range(longest) for group in spread if turn < len(group.trajectories))
    return [trajectory for trajectory, _ in zip(turns, range(count), strict=False)]


def row(trajectory: Trajectory, decode: Decode | None) -> dict[str, object]:
    """One line of the file."""
    prompt, completion = trajectory.prompt, trajectory.completion
    return {
        "prompt": prompt.id,
        "source": prompt.source,
        "question": decode(prompt.token_ids.tolist()) if decode else None,
        "answer": prompt.answer,
        "completion": trajectory.text,
        "finish_reason": completion.finish_reason.value,
        "reward": _finite(trajectory.reward),
        "reward_components": {name: _finite(value) for name, value in trajectory.reward_components.items()},
        "versions": [[span.version, span.start, span.end] for span in completion.spans],
        "prompt_tokens": prompt.token_ids.tolist(),
        "tokens": completion.token_ids.tolist(),
        "logprobs": np.round(completion.logprobs.astype(np.float64), 6).tolist(),
    }


def sample_path(folder: Path, step: int, kind: str = "step") -> Path:
    return folder / FOLDER / f"{kind}_{step}.jsonl"


def cut(folder: Path, step: int) -> None:
    """Remove the samples of steps after `step`: what a resumed run will do again."""
    for found, path in sample_files(folder):
        if found > step:
            path.unlink()


def sample_files(folder: Path) -> Iterator[tuple[int, Path]]:
    """(step, file), in the order of the steps."""
    found = [(path.stem.removeprefix("step_"), path) for path in (folder / FOLDER).glob("step_*.jsonl")]
    yield from sorted((int(step), path) for step, path in found if step.isdigit())


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
