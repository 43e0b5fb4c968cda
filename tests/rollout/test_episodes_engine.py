"""Episodes on a real SGLang server: what the engine saw is what is trained on, turn after turn."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from app.rollout.engine.remote import RemoteEngine
from app.types import Completion, GroupRequest, InFlight
from tests.rollout.episodes import (
    TALK,
    TURNS,
    Recording,
    asked,
    group,
    largest_difference_of_sequences,
    played,
    rollouter_of,
    tiny_prompt,
    trained,
)
from tests.rollout.support import HOT, noisy_model


def held(recording: Recording, index: int) -> int:
    """Tokens of the longest earlier request and its completion that this request begins with."""
    tokens = recording.requests[index].token_ids.tolist()
    longest = 0
    for request, completion in zip(recording.requests[:index], recording.completions[:index], strict=True):
        before = [*request.token_ids.tolist(), *completion.token_ids.tolist()]
        if tokens[: len(before)] == before:
            longest = max(longest, len(before))
    return longest


async def test_every_request_begins_with_its_sequence_and_finds_it_in_the_cache_and_all_turns_have_exact_logprobs(
    engine: RemoteEngine, tiny_model: Path, own: Any
) -> None:
    recording = Recording(engine)
    spec = own(TALK, max_turn_tokens=24, model=tiny_model)
    groups = await played(spec, recording, tiny_model, prompts=2, temperature=HOT)

    trajectories = [trajectory for each in groups for trajectory in each.trajectories]
    assert [len(trajectory.sequences) for trajectory in trajectories] == [2] * 8
    assert len(recording.requests) == 8 * TURNS
    sequences = [sequence for trajectory in trajectories for sequence in trajectory.sequences]
    assert asked(recording) == trained(sequences)

    # against transformers, and with the mask shifted by one
    policy = noisy_model(tiny_model, 0)
    assert largest_difference_of_sequences(policy, sequences, HOT) < 1e-4
    shifted = [replace(sequence, sampled=np.roll(sequence.sampled, -1)) for sequence in sequences]
    assert largest_difference_of_sequences(policy, shifted, HOT) > 1e-3

    # in the cache: all but the last sampled token, which the engine has not computed yet
    later = [index for index in range(len(recording.requests)) if held(recording, index)]
    assert len(later) == 8 * (TURNS - 2)  # without the first turn of each sequence
    for index in later:
        assert recording.completions[index].cached_tokens >= held(recording, index) - 1
    metrics = [trajectory.episode.metrics for trajectory in trajectories if trajectory.episode]
    assert sum(each["prompt_tokens"] for each in metrics) == sum(len(each.token_ids) for each in recording.requests)
    assert sum(each["cached_tokens"] for each in metrics) == sum(each.cached_tokens for each in recording.completions)


async def test_a_turn_after_a_pause_finds_nothing_in_the_cache(
    engine: RemoteEngine, tiny_model: Path, own: Any
) -> None:
    """A push pauses: what an older policy computed is not used."""

    class Pausing(Recording):
        async def generate(self, request: GroupRequest) -> list[Completion]:
            if request.turn.startswith("3 of"):
                await engine.pause(InFlight.drain)
                await engine.resume()
            return await super().generate(request)

    recording = Pausing(engine)
    async with rollouter_of(own(TALK, max_turn_tokens=24, model=tiny_model), [recording]) as rollouter:
        await group(rollouter, tiny_prompt(1, tiny_model), size=1, temperature=HOT)
    before = [held(recording, index) for index in range(TURNS)]
    cached = [completion.cached_tokens for completion in recording.completions]
    assert cached[1] >= before[1] - 1 > 0  # more where an earlier test sampled the same
    assert (before[2] > before[1], cached[2]) == (True, 0)
    assert cached[TURNS - 1] >= before[TURNS - 1] - 1


FAILS_ONCE = """
import asyncio, pathlib

class Env:
    def __init__(self, folder):
        self.path = pathlib.Path(folder) / "failed"
    async def run(self, task, policy):
        first = asyncio.ensure_future(policy(None))
        if not self.path.exists():
            while not (self.path.parent / "sampling").exists():
                await asyncio.sleep(0.01)
            self.path.touch()
            raise RuntimeError("failed while the policy spoke")
        return float(len((await first).token_ids))
"""


async def test_an_episode_that_fails_while_an_engine_samples_for_it_is_played_again(
    engine: RemoteEngine, tiny_model: Path, own: Any, tmp_path: Path
) -> None:
    """Its request is not waited for, and does not stand in the way of the next one."""

    class Tells(Recording):
        async def generate(self, request: GroupRequest) -> list[Completion]:
            task = asyncio.create_task(engine.generate(request))
            (tmp_path / "sampling").touch()
            return await task

    spec = own(FAILS_ONCE, args={"folder": str(tmp_path)}, model=tiny_model)
    async with rollouter_of(spec, [Tells(engine)], retries=1) as rollouter:
        result = await group(rollouter, tiny_prompt(1, tiny_model), size=1, temperature=HOT)
    (trajectory,) = result.trajectories
    assert trajectory.reward == trajectory.sampled_tokens > 0
