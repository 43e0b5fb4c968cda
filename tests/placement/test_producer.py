"""Completions that take longer than the staleness bound allows: what is discarded, begun again and reported."""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from app.errors import EngineError
from app.placement.fully_async import FullyAsync
from app.types import InFlight
from tests.placement.test_fully_async import assert_bound, assert_ledger, hash_of, total
from tests.simulation import World, config, play, virtual


def rare_tail(seconds: float, *, every: int = 10) -> Callable[[str], float]:
    """One prompt in `every` takes so long, the others 1 s."""
    return lambda prompt_id: seconds if hash_of(prompt_id) % every == 0 else 1.0


@pytest.mark.parametrize(("staleness", "mode"), [(1, InFlight.retract), (2, InFlight.in_place)])
def test_tokens_that_become_too_stale_are_counted(tmp_path: Path, staleness: int, mode: InFlight) -> None:
    made = config(steps=30, max_staleness=staleness, in_flight=mode)
    world = World(made, tmp_path, rare_tail(9.0), tokens=1000)
    play(world)
    discarded = sum(line["rollout/discarded_tokens"] for line in world.recorder.lines)
    dropped = total(world, "dropped") * 2 * 1000
    aborted = total(world, "aborted") * 2 * 1000  # had they been sampled to the end
    assert aborted > 0
    assert dropped < discarded < dropped + aborted
    for line in world.recorder.lines:
        tokens = line["rollout/discarded_tokens"]
        assert line["rollout/discarded_fraction"] == tokens / (tokens + line["tokens/completion"])


@virtual
async def test_a_group_aborted_halfway_counts_half_of_its_tokens(tmp_path: Path) -> None:
    world = World(config(max_staleness=1, in_flight=InFlight.retract), tmp_path, lambda p: 10.0, tokens=100)

    made = FullyAsync(world.context())
    producer = asyncio.create_task(made.producer.run())
    await asyncio.sleep(5)
    made.producer.pause_dispatch()
    await made.producer.abort_stale(2)
    await asyncio.sleep(0.1)
    producer.cancel()
    counts = made.producer.drain_counts()
    assert (counts.aborted, counts.discarded_tokens) == (8, 8 * 2 * 50)


@virtual
async def test_a_prompt_that_is_sent_again_is_as_old_as_its_new_request(tmp_path: Path) -> None:
    world = World(config(max_staleness=1, in_flight=InFlight.retract), tmp_path, lambda p: 10.0, engine_count=1)

    made = FullyAsync(world.context())
    producer = asyncio.create_task(made.producer.run())
    engine = world.engines[0]
    await asyncio.sleep(5)
    made.producer.staleness.version = 2
    engine.die(EngineError("refused on purpose"))
    await asyncio.sleep(0.1)
    engine.fail = None
    await asyncio.sleep(5)

    aborted = []
    for version in (3, 4):
        await made.producer.abort_stale(version)
        await asyncio.sleep(0.1)
        aborted.append(len(engine.aborted))
    producer.cancel()
    assert aborted == [0, 8]


@pytest.mark.parametrize("staleness", [1, 2])
def test_an_aborted_prompt_begins_again_at_the_sync_and_has_the_whole_bound(tmp_path: Path, staleness: int) -> None:
    made = config(steps=30, max_staleness=staleness, in_flight=InFlight.retract)
    world = World(made, tmp_path, rare_tail(9.0))
    play(world)
    synced_at = {at: version for at, version in world.sync.pushed}
    restarts = 0
    for prompt_id in {prompt_id for engine in world.engines for prompt_id in engine.aborted}:
        begun = sorted((at, version) for engine in world.engines for at, version, p in engine.begun if p == prompt_id)
        for at, version in begun[1:]:
            assert synced_at[at] == version  # at once, before any other prompt
            restarts += 1
    assert restarts >= 3


@pytest.mark.parametrize("smaller", ["rollout.max_completion_tokens", "environment.max_turns"])
def test_a_prompt_that_never_fits_the_bound_is_reported_once_with_what_to_change(smaller: str, tmp_path: Path) -> None:
    made = config(steps=40, max_staleness=1, in_flight=InFlight.retract)
    if smaller == "environment.max_turns":
        made.environment._target_ = "my_envs.Guess"
    world = World(made, tmp_path, rare_tail(12.0), tokens=1000)
    play(world)
    assert_ledger(world)
    assert_bound(world)
    (warned,) = [text for text in world.recorder.warnings if "was aborted" in text]
    assert re.match(r"prompt sim/\d*0@0 .* 3 times", warned)
    assert "placement.max_staleness" in warned
    assert smaller in warned
    tails = [prompt_id for prompt_id in world.trainer.ids if hash_of(prompt_id) % 10 == 0]
    assert tails  # nothing is skipped: they are trained on when they fit


def test_a_prompt_that_fits_the_second_time_is_not_reported(tmp_path: Path) -> None:
    world = World(config(steps=12, max_staleness=2, in_flight=InFlight.retract), tmp_path, rare_tail(2.0))
    play(world)
    assert [text for text in world.recorder.warnings if "was aborted" in text] == []


def test_nothing_is_discarded_that_ends_within_its_bound_while_newer_groups_wait(tmp_path: Path) -> None:
    """Training is the slower side: the buffer is full, and a long completion arrives behind the short ones."""
    made = config(steps=20, max_staleness=3, in_flight=InFlight.retract, max_inflight_groups=16)
    world = World(made, tmp_path, rare_tail(9.0))
    world.trainer.seconds = 1.0  # 4 s a step: the long ones take two to three of the four steps that they have
    play(world)
    assert_ledger(world)
    assert_bound(world)
    assert sum(line["rollout/discarded_tokens"] for line in world.recorder.lines) == 0
