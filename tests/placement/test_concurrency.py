"""Engines that retract requests over and over: fewer groups are in flight, and a warning says so."""

from pathlib import Path
from typing import Any

import pytest

from app.config.recovery import RecoveryConfig
from app.placement.concurrency import Concurrency
from app.rollout.requests import Requests
from app.tracking.run_folder.timeline import Timeline
from tests.placement.test_fully_async import assert_ledger
from tests.simulation import SimEngine, World, config, now, play


@pytest.mark.parametrize(
    ("retractions", "changes", "expected", "warned"),
    [
        # down to the groups of a step, 8
        ([11] * 14, {}, [24, 19, 19, 15, 15, 12, 12, 9, 9, 8, 8, 8, 8, 8], ["19", "15", "12", "9", "8", "8"]),
        ([10, 10, 10, 90, 0, 90, 10, 90], {}, [24] * 8, []),
        ([50] * 6, {"max_staleness": 0}, [8] * 6, ["8"]),
        ([50] * 6, {"max_inflight_groups": 20}, [20] * 6, ["20"]),
    ],
)
def test_two_steps_in_a_row_with_many_retractions_lower_the_number_and_one_that_stays_is_warned_about_once(
    retractions: list[int], changes: dict[str, Any], expected: list[int], warned: list[str]
) -> None:
    warnings: list[str] = []
    made = config(**{"prompts_per_step": 8, "max_staleness": 2, "max_inflight_groups": None} | changes)
    concurrency = Concurrency(made, warnings.append, adapts=made.rollout.max_inflight_groups is None)
    requests = Requests(Timeline(), RecoveryConfig())
    groups = []
    for count in retractions:
        requests.completions += 100
        requests.retractions += count
        assert concurrency.end_step(requests) == {"rollout/retractions": float(count)}
        groups.append(concurrency.groups)
    assert groups == expected
    assert [number in text for number, text in zip(warned, warnings, strict=True)] == [True] * len(warned)


@pytest.mark.parametrize(("adapts", "last"), [(True, 4), (False, 8)])
def test_the_producer_keeps_to_the_lowered_number(
    adapts: bool, last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_flight: list[tuple[float, int]] = []

    def seconds(prompt_id: str) -> float:
        in_flight.append((now(), 1 + sum(len(engine._running) for engine in world.engines)))
        return 1.0

    monkeypatch.setattr(SimEngine, "retractions", 1)
    world = World(config(steps=30, max_staleness=2, max_inflight_groups=12), tmp_path, seconds, adapts=adapts)
    play(world)
    assert_ledger(world)
    assert max(count for _, count in in_flight) == 12
    assert max(count for at, count in in_flight if at > 0.5 * in_flight[-1][0]) == last
    assert sum(line["rollout/retractions"] for line in world.recorder.lines) >= 30 * 4 * 2
