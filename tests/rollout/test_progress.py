"""Which prompts in flight make no progress, by the reports of a server."""

import asyncio

import pytest

from app.rollout.progress import InFlightRequests, ProgressClock, stall

LIMIT_S = 10.0
PROMPTS: InFlightRequests = {"a": ["a#0", "a#1"], "b": ["b#0"]}


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        # both sample
        ([{"a#0": n, "a#1": n, "b#0": n} for n in range(9)], []),
        # one member samples, the other one finished
        ([{"a#0": n, "b#0": n} for n in range(9)], []),
        # the server forgot b
        ([{"a#0": n, "b#0": n} if n < 2 else {"a#0": n} for n in range(4)], []),
        ([{"a#0": n, "b#0": n} if n < 2 else {"a#0": n} for n in range(6)], ["b"]),
        # it never knew b
        ([{"a#0": n} for n in range(4)], ["b"]),
        # b waits for a place while a samples; it stands still when nothing is sampled
        ([{"a#0": n, "b#0": None} for n in range(9)], []),
        ([{"a#0": 3, "b#0": None} for n in range(4)], ["a", "b"]),
        # while requests are queued, prefills may hold up a request that is being sampled
        ([{"a#0": 3, "a#1": n, "b#0": None} for n in range(9)], []),
        ([{"a#0": n, "b#0": 3} for n in range(4)], ["b"]),
        # what the server forgot is found while requests are queued, too
        ([{"a#0": n, "a#1": None} for n in range(4)], ["b"]),
        # no reply
        ([{"a#0": 1, "b#0": 1}, None, None, None], ["a", "b"]),
        ([None, None, {"a#0": 1, "b#0": 1}, None], []),
    ],
)
def test_a_prompt_is_stalled_when_its_requests_neither_advance_nor_wait_their_turn(
    reports: list[dict[str, int | None] | None], expected: list[str]
) -> None:
    clock = ProgressClock()
    for index, report in enumerate(reports):
        clock.observe(PROMPTS, report, 4.0 * index)
    assert clock.stalled(4.0 * (len(reports) - 1), LIMIT_S) == expected


def test_the_clocks_stand_still_while_the_server_is_paused() -> None:
    clock = ProgressClock()
    clock.observe(PROMPTS, {"a#0": 1, "b#0": 1}, 0.0)
    clock.reset({}, 1000.0)
    clock.observe(PROMPTS, {"a#0": 1, "b#0": 1}, 1004.0)
    assert clock.stalled(1014.0, LIMIT_S) == []
    assert clock.stalled(1014.1, LIMIT_S) == ["a", "b"]


def test_sampled_tokens_never_decrease_while_a_prompt_is_in_flight() -> None:
    clock = ProgressClock()
    clock.observe(PROMPTS, {"a#0": 5, "a#1": 7}, 0.0)
    clock.observe(PROMPTS, {"a#0": None, "a#1": 9}, 4.0)  # retracted
    assert clock.tokens(["a#0", "a#1"]) == 14
    clock.observe(PROMPTS, {"a#0": 6}, 8.0)  # the other one finished
    assert clock.tokens(["a#0", "a#1"]) == 15
    assert (clock.lost("a"), clock.lost("b")) == (False, True)  # one member is known, and none
    clock.observe({"b": ["b#0"]}, {}, 12.0)
    assert clock.tokens(["a#0", "a#1"]) == 0


async def test_each_sign_of_progress_of_a_server_without_reports_is_counted() -> None:
    class Client:
        name = "engine 0"
        asked = 0

        async def unfinished(self, seconds: float) -> None:
            return None

        async def healthy(self, route: str, seconds: float) -> bool:
            self.asked += 1
            return self.asked <= 3

    clock = ProgressClock()
    stalled = stall(Client(), clock, lambda: {"a": ["a#0"]}, limit_s=0.04)  # type: ignore[arg-type]
    await asyncio.wait_for(stalled, 60)
    assert clock.beats == 3
