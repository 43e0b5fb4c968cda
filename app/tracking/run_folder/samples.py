"""`samples/step_N.jsonl`: some of the trajectories of each training step, for people to read.

Samples are chosen regardless of their rewards: prompts are spread evenly over the step's groups, and each contributes
one trajectory before any contributes a second. They show what the policy does, not its best or worst.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path

import numpy as np
import orjson

from app.types import Episode, Group, Trajectory, VersionSpan
from app.utils.files import replace_file

FOLDER = "samples"
Decode = Callable[[Sequence[int]], str]  # token ids → text


def write_samples(
    folder: Path, step: int, groups: Sequence[Group], count: int, decode: Decode | None = None, *, kind: str = "step"
) -> Path | None:
    """Write up to `count` trajectories of a step; return the file, None if there is nothing to write.

    `decode` turns prompt tokens into text; None leaves it out. `kind`: `step`, or `eval` after that step.
    """
    chosen = choose(groups, count)
    if not chosen:
        return None

    path = folder / FOLDER / f"{kind}_{step}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, b"".join(line(row(trajectory, decode)) for trajectory in chosen))
    return path


def choose(groups: Sequence[Group], count: int) -> list[Trajectory]:
    """Return the first trajectory of evenly spaced groups, then the second of each, and so on."""
    prompts = min(count, len(groups))
    chosen = [groups[index * len(groups) // prompts].trajectories for index in range(prompts)]
    rounds = zip_longest(*chosen)
    return [trajectory for each in rounds for trajectory in each if trajectory is not None][:count]


def line(values: dict[str, object]) -> bytes:
    """Return a row as a line of JSON. `json` would take milliseconds for the arrays of one long completion."""
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
    return orjson.dumps(values, default=np.ndarray.tolist, option=options)  # arrays with gaps come to the default


def row(trajectory: Trajectory, decode: Decode | None) -> dict[str, object]:
    """Return one line of the file, with arrays of numbers."""
    prompt, completion = trajectory.prompt, trajectory.completion
    episode = {} if trajectory.episode is None else _episode(trajectory.episode)
    return {
        "prompt": prompt.id,
        "source": prompt.source,
        "question": prompt.question,
        "prompt_text": decode(prompt.token_ids.tolist()) if decode else None,
        "answer": prompt.answer,
        "completion": trajectory.text,
        "finish_reason": completion.finish_reason.value,
        "reward": _finite(trajectory.reward),
        "reward_components": {name: _finite(value) for name, value in trajectory.reward_components.items()},
        "versions": _versions(completion.spans),
        "prompt_tokens": prompt.token_ids,
        "tokens": completion.token_ids,
        "logprobs": _rounded(completion.logprobs),
        **episode,
    }


def _episode(episode: Episode) -> dict[str, object]:
    """Return what the line of a multi-turn trajectory has in addition: its completion is the last one."""
    return {
        "turns": [asdict(turn) for turn in episode.turns],
        "ending": episode.ending.value,
        "scores": {name: _finite(value) for name, value in episode.scores.items()},
        "sequences": [
            {
                "tokens": sequence.token_ids,
                "sampled": sequence.sampled.astype(int),
                "logprobs": _rounded(sequence.logprobs),
                "versions": _versions(sequence.spans),
            }
            for sequence in episode.sequences
        ],
    }


def _versions(spans: Sequence[VersionSpan]) -> list[list[int]]:
    return [[span.version, span.start, span.end] for span in spans]


def move_after(folder: Path, step: int, out: Path) -> None:
    """Move the samples of steps after `step`, of training and of evaluations, to the run folder `out`."""
    for path in (folder / FOLDER).glob("*_*.jsonl"):
        sampled = path.stem.rpartition("_")[2]
        if sampled.isdecimal() and int(sampled) > step:
            (out / FOLDER).mkdir(parents=True, exist_ok=True)
            path.rename(out / FOLDER / path.name)


def sample_files(folder: Path, kind: str = "step") -> list[tuple[int, Path]]:
    """Return (step, file) of the samples of steps or, with `kind="eval"`, of evaluations, in step order."""
    files = [(path.stem.removeprefix(f"{kind}_"), path) for path in (folder / FOLDER).glob(f"{kind}_*.jsonl")]
    return sorted((int(step), path) for step, path in files if step.isdigit())


def _rounded(logprobs: np.ndarray) -> np.ndarray:
    return np.round(logprobs.astype(np.float64), 6)


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
