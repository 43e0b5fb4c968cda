"""Try custom rewards before anything starts: on made-up completions of a few real rows, in a worker as in a run.

For each prompt the reward scores a group of two: its answer as the completion, and an empty text. A reward that fails
on all of them would fail on everything, and is refused. One that does not prefer the answer is a warning.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np

from app.config.reward import RewardConfig
from app.errors import RunError, echo
from app.reward.component import Failure, FailureKind, LoggedScore, RewardComponent, Value
from app.reward.reward_pool import RewardPool
from app.reward.scorer import components_of, not_accepted
from app.types import Completion, FinishReason, Prompt, Trajectory, VersionSpan
from app.utils.tasks import run_blocking
from app.utils.user_code import LoadError
from app.worker.remote import NO_LOG

MAX_PROMPTS = 3
CALL_TIMEOUT_S = 20.0  # for one call, even if `reward.timeout_s` allows more
SCORING = "a reward that returns one finite number per trajectory, or reward.tryout=false, which skips this try"
SLOW_SECONDS = 5.0  # of a call: then a line says what is waited for
BUILT_IN_SCORES = {"exact": [1.0, 0.0], "math": [1.0, 0.0], "format": [0.0, 0.0]}  # of an answer and an empty text

Tokenize = Callable[[str], Sequence[int]]


def try_rewards(config: RewardConfig, prompts: Sequence[Prompt], tokenize: Tokenize) -> list[str]:
    """Load every custom reward and, with `reward.tryout`, try it on made-up completions.

    Returns warnings about rewards that fail on some of them, or do not prefer the answer. Raises `ConfigError` if a
    reward cannot be loaded, fails on everything, or takes longer than it may.
    """
    warnings: list[str] = []
    terms = config.terms()
    scores = {name: values for name, values in BUILT_IN_SCORES.items() if name in terms}
    tried = prompts[:MAX_PROMPTS] if config.tryout else []
    for component in components_of(config):
        if component.key is None:
            continue
        values = run_blocking(_try_component(component, tried, tokenize, min(config.timeout_s, CALL_TIMEOUT_S)))
        failures = [value for value in values if isinstance(value, Failure)]
        if failures and len(failures) == len(values):
            what = f"each of {len(values)} made-up completions ended as {failures[0]}"
            raise not_accepted(component, what, SCORING)
        if failures:
            warnings.append(
                f"reward component {component.name} failed on {len(failures)} of {len(values)} made-up completions "
                f"(answers and empty texts): {failures[0]}. Where that happens in the run, the trajectory scores 0."
            )
        if values and all(value is None for value in values):
            what = f"no opinion (None) on each of {len(values)} made-up completions (answers and empty texts)"
            warnings.append(f"reward component {component.name} has {what}")
        scores[component.name] = [_number(value) for value in values]

    if tried and all(prompt.answer for prompt in tried) and all(scores.get(name) for name in terms):
        right, empty = (
            math.fsum(term.weight * fmean(scores[name][first::2]) for name, term in terms.items()) for first in (0, 1)
        )
        # both are 0 where a reward reads the answer in a form of its own
        if right <= empty and (right, empty) != (0, 0):
            warnings.append(
                f"the reward of the right answer is {right:.3g} and that of an empty text {empty:.3g}, in the mean "
                "over made-up completions: it does not tell them apart, or its sign is wrong"
            )
    return warnings


def _number(value: Value) -> float:
    if isinstance(value, Failure):
        return math.nan
    return value.score if isinstance(value, LoggedScore) else value or 0.0


async def _try_component(
    component: RewardComponent, prompts: Sequence[Prompt], tokenize: Tokenize, timeout_s: float
) -> list[Value]:
    """Score two made-up completions of each prompt, alone where the call for both fails."""
    values: list[Value] = []
    pool = RewardPool(component, workers=1, timeout_s=timeout_s, log=NO_LOG, warn=lambda _: None)
    slow = f"trying reward component {component.name}: no result after {SLOW_SECONDS:g} s; it has {timeout_s:g} s"

    async def score(group: list[Trajectory]) -> list[Value]:
        outcome = await pool.call(group, timeout_s, SLOW_SECONDS, partial(echo, slow))
        if not isinstance(outcome, Failure):
            return outcome
        if outcome.kind is FailureKind.timeout:
            what = f"no result for {len(group)} completions within {timeout_s:g} s (reward.timeout_s)"
            raise not_accepted(component, what, SCORING)
        return [outcome] if len(group) == 1 else [value for each in group for value in await score([each])]

    try:
        await pool.start_workers()
        for prompt in prompts:
            values += await score([_made_up(prompt, text, tokenize) for text in (prompt.answer, "")])
    except (LoadError, OSError, RunError) as error:
        raise not_accepted(component, str(error)) from error
    finally:
        pool.close()
        await asyncio.sleep(0)  # closes its pipe
    return values


def _made_up(prompt: Prompt, text: str, tokenize: Tokenize) -> Trajectory:
    """Return a trajectory with this completion, which has at least one token."""
    token_ids = np.asarray([*tokenize(text)] or [0], np.int32)
    spans = (VersionSpan(0, 0, len(token_ids)),)
    logprobs = np.zeros(len(token_ids), np.float32)
    return Trajectory(prompt, Completion(token_ids, logprobs, FinishReason.stop, spans), text)


def tokenizer_of(tokenizer: Any) -> Tokenize:
    """Return the token ids of a completion under a Hugging Face tokenizer, its end of sequence included."""
    end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    return lambda text: [*(tokenizer(text, add_special_tokens=False)["input_ids"] if text else []), *end]
