"""Trajectories to score, and custom rewards."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from app.types import Completion, FinishReason, Prompt, Trajectory, VersionSpan

TOKENS = 8


@pytest.fixture
def trajectory() -> Callable[..., Trajectory]:
    """Return a factory of completions with a given text, for a prompt with a given answer."""

    def make(text: str, answer: str = "42", prompt_id: str = "set/0@0", **columns: object) -> Trajectory:
        prompt = Prompt(prompt_id, np.zeros(4, np.int32), answer, "set", question="what is it?", row=columns)
        completion = Completion(
            token_ids=np.zeros(TOKENS, np.int32),
            logprobs=np.zeros(TOKENS, np.float32),
            finish_reason=FinishReason.stop,
            spans=(VersionSpan(0, 0, TOKENS),),
        )
        return Trajectory(prompt, completion, text)

    return make


@pytest.fixture
def custom_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Write a custom reward module, put it on the path, and return its name."""

    def write(source: str) -> str:
        name = f"custom_{tmp_path.name}"
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path))
        return name

    return write
