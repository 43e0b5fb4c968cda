"""Weights that are pushed while episodes are inside their environments, or between two of their turns."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.config.weight_sync import Verify
from app.types import InFlight, TokenSequence, VersionSpan
from tests.rollout.episodes import group, largest_difference_of_sequences, pieces, rollouter_of, tiny_prompt
from tests.rollout.support import HOT, noisy_model
from tests.waiting import until
from tests.weight_sync.support import make_synchronizer, set_weights

SYNCS = ((41, 1), (42, 2))  # version, seed of its weights
# A tool call in the first turn that ends when the file `go` exists.
SLOW_TOOL = """
import asyncio, pathlib

class Env:
    def __init__(self, folder):
        self.folder, self.said = pathlib.Path(folder), 0
    async def step(self, reply):
        self.said += 1
        if self.said == 1:
            (self.folder / f"in {id(self)}").touch()
            while not (self.folder / "go").exists():
                await asyncio.sleep(0.01)
        return "12+30=" if self.said == 1 else None
    def begin(self, task):
        return None
    def score(self):
        return 1.0
"""


def of_piece(sequence: TokenSequence, number: int) -> TokenSequence:
    """The sequence as if only this piece had been sampled."""
    spans = pieces(sequence)
    start, end = spans[number]
    first = sum(each[1] - each[0] for each in spans[:number])
    sampled = sequence.sampled.copy()
    sampled[:start] = sampled[end:] = False
    return replace(sequence, sampled=sampled, logprobs=sequence.logprobs[first : first + end - start])


def difference(model: Path, seed: int, sequences: Sequence[TokenSequence], number: int) -> float:
    """Of one turn's log-probabilities from those of weights with the noise of `seed`."""
    return largest_difference_of_sequences(
        noisy_model(model, seed), [of_piece(each, number) for each in sequences], HOT
    )


@pytest.mark.parametrize("mode", [InFlight.drain, InFlight.in_place])
async def test_two_pushes_during_a_tool_call_wait_for_no_episode_and_the_next_turn_is_of_the_last(
    mode: InFlight, trainer: Any, engine: Any, tiny_model: Path, own: Any, tmp_path: Path
) -> None:
    version = [40]

    await set_weights(trainer, 0)
    synchronizer = await make_synchronizer("ipc", trainer, [engine], tmp_path, verify=Verify.never, in_flight=mode)
    await synchronizer.sync(40)
    spec = own(SLOW_TOOL, args={"folder": str(tmp_path)}, model=tiny_model, max_turn_tokens=12)
    async with rollouter_of(spec, [engine]) as rollouter:
        prompt = tiny_prompt(3, tiny_model)
        playing = asyncio.create_task(group(rollouter, prompt, size=3, temperature=HOT, version=lambda: version[0]))
        await asyncio.to_thread(until, lambda: len(list(tmp_path.glob("in *"))) == 3, 60)
        for number, seed in SYNCS:
            await set_weights(trainer, seed)
            await asyncio.wait_for(synchronizer.sync(number), 60)
            version[0] = number
        (tmp_path / "go").touch()
        played = await playing
    await synchronizer.close()
    sequences = [sequence for trajectory in played.trajectories for sequence in trajectory.sequences]
    assert len(sequences) == 3
    for sequence in sequences:
        (start, end), (_, _) = pieces(sequence)
        first, count = end - start, len(sequence.logprobs)
        assert sequence.spans == (VersionSpan(40, 0, first), VersionSpan(42, first, count))
    assert played.oldest_version == 40
    assert [difference(tiny_model, seed, sequences, 0) < 1e-5 for seed in (0, 1, 2)] == [True, False, False]
    assert [difference(tiny_model, seed, sequences, 1) < 1e-5 for seed in (0, 1, 2)] == [False, False, True]
