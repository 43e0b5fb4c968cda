"""Weights that are pushed while episodes are inside their environments, or between two of their turns."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.config.weight_sync import Verify
from app.types import Group, InFlight, Strand, VersionSpan
from tests.rollout.episodes import group, largest_difference_of_strands, pieces, rollouter_of, tiny_prompt
from tests.rollout.support import HOT
from tests.waiting import until
from tests.weight_sync.support import make_synchronizer, noisy_model, set_weights

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


def of_piece(strand: Strand, number: int) -> Strand:
    """The strand as if only this piece had been sampled."""
    spans = pieces(strand)
    start, end = spans[number]
    first = sum(each[1] - each[0] for each in spans[:number])
    sampled = strand.sampled.copy()
    sampled[:start] = sampled[end:] = False
    return replace(strand, sampled=sampled, logprobs=strand.logprobs[first : first + end - start])


def difference(model: Path, seed: int, strands: Sequence[Strand], number: int) -> float:
    """Of one turn's log-probabilities from those of weights with the noise of `seed`."""
    return largest_difference_of_strands(noisy_model(model, seed), [of_piece(each, number) for each in strands], HOT)


@pytest.mark.parametrize("mode", list(InFlight))
def test_two_pushes_during_a_tool_call_wait_for_no_episode_and_the_next_turn_is_of_the_last(
    mode: InFlight, trainer: Any, engine: Any, tiny_model: Path, own: Any, tmp_path: Path
) -> None:
    version = [40]

    async def scenario() -> Group:
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
        return played

    played = asyncio.run(scenario())
    strands = [strand for trajectory in played.trajectories for strand in trajectory.strands]
    assert len(strands) == 3
    for strand in strands:
        (start, end), (_, _) = pieces(strand)
        first, count = end - start, len(strand.logprobs)
        assert strand.spans == (VersionSpan(40, 0, first), VersionSpan(42, first, count))
    assert played.oldest_version == 40
    assert [difference(tiny_model, seed, strands, 0) < 1e-5 for seed in (0, 1, 2)] == [True, False, False]
    assert [difference(tiny_model, seed, strands, 1) < 1e-5 for seed in (0, 1, 2)] == [False, False, True]
