"""Self-distillation: the policy, with the answer in its prompt, scores completions that it sampled without it.

The run's own engines compute the log-probabilities, with the weights that they have when a completion is scored.
"""

import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np

from app.config import RunConfig
from app.data.build import encode
from app.data.row import Row
from app.errors import RunError, expect
from app.rollout.engine.pool import EnginePool
from app.rollout.requests import Requests
from app.types import Group, GroupRequest, Prompt, Sampling, Trajectory
from app.utils.tasks import gather_or_raise

SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_tokens=0)


class SelfTeacher:
    """The engines of the run as the teacher of `teacher.prompt`. Its requests are sent again as those of rollouts."""

    def __init__(self, config: RunConfig, tokenizer: Any, pool: EnginePool, requests: Requests) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._pool = pool
        self._requests = requests

    async def score(self, group: Group) -> Group:
        """Return the group with the teacher's log-probabilities. Raises as `Requests.send` does."""
        prompt = teacher_prompt(group.prompt, self._config, self._tokenizer)
        numbered = enumerate(group.trajectories)
        trajectories = await gather_or_raise(*(self._trajectory(each, prompt, member) for member, each in numbered))
        return Group(group.prompt, tuple(trajectories))

    async def _trajectory(self, trajectory: Trajectory, prompt: np.ndarray, member: int) -> Trajectory:
        sampled = trajectory.completion.token_ids
        if not len(sampled):
            return trajectory.with_teacher([np.zeros(0, dtype=np.float32)])

        name = trajectory.prompt.id
        tokens = np.concatenate([prompt, sampled])
        request = GroupRequest(name, tokens, 1, SAMPLING, 0, turn=f"teacher {member}", scored_tokens=len(sampled))
        # Which version scored is not used.
        (scored,) = await self._requests.send(request, lambda: 0, partial(self._pool.least_busy, 1))
        if len(scored.logprobs) != len(sampled) or not np.isfinite(scored.logprobs).all():
            raise RunError(f"an engine did not score every token of prompt {name} as its own teacher")
        return trajectory.with_teacher([scored.logprobs])


def require_self_teacher(prompts: Iterable[Prompt], config: RunConfig, tokenizer: Any) -> None:
    """Raise `ConfigError` unless `teacher.prompt` can replace each of these prompts."""
    setting, limit = config.teacher.prompt, config.rollout.max_prompt_tokens
    longest = 0
    for prompt in prompts:
        expect(not prompt.messages, "teacher.prompt", setting, f"null with messages, as {prompt.id} has")
        accepted = f"a field that the rows have with teacher.prompt, which holds it; {prompt.id} has none"
        expect(bool(prompt.answer), "data.answer", config.data.answer, accepted)
        longest = max(longest, len(teacher_prompt(prompt, config, tokenizer)))
    accepted = f"at least {longest}, the length of the longest prompt with teacher.prompt"
    expect(longest <= limit, "rollout.max_prompt_tokens", limit, accepted)


def teacher_prompt(prompt: Prompt, config: RunConfig, tokenizer: Any) -> np.ndarray:
    """Return the tokens [P] int32 of `teacher.prompt`, filled in, in the template of the data."""
    values: Mapping[str, str] = {"question": prompt.question, "answer": prompt.answer}
    question = re.sub(r"\{(question|answer)\}", lambda found: values[found[1]], config.teacher.prompt or "")
    row = Row(question, prompt.answer, prompt.source, 0, prompt.row, template_kwargs=prompt.template_kwargs)
    (tokens,) = encode([row], config.data, tokenizer)
    return tokens
