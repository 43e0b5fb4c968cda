"""Groups built from rewards and lengths."""

from collections.abc import Mapping, Sequence

import numpy as np

from app.types import Completion, FinishReason, Group, Prompt, Trajectory, VersionSpan


def group(
    rewards: Sequence[float],
    lengths: Sequence[int] | None = None,
    *,
    components: Sequence[Mapping[str, float]] | None = None,
    truncated: Sequence[bool] | None = None,
    versions: Sequence[int] | None = None,
    prompt_tokens: int = 3,
) -> Group:
    """A group whose trajectories have these rewards. Defaults: length 1, no reward components, version 0."""
    prompt = Prompt("test/0@0", np.arange(prompt_tokens, dtype=np.int32), "1", "test")
    trajectories = []
    for i, reward in enumerate(rewards):
        length = lengths[i] if lengths else 1
        version = versions[i] if versions else 0
        completion = Completion(
            token_ids=np.zeros(length, dtype=np.int32),
            logprobs=np.zeros(length, dtype=np.float32),
            finish_reason=FinishReason.length if truncated and truncated[i] else FinishReason.stop,
            spans=(VersionSpan(version, 0, 1), VersionSpan(version + 1, 1, length)),
        )
        trajectories.append(Trajectory(prompt, completion, "", reward, components[i] if components else {}))
    return Group(prompt, tuple(trajectories))
