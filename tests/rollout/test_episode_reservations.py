"""`rollout.max_completion_tokens` bounds a trajectory whose agent asks for several replies at once. In virtual time."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.environment.protocol import EpisodeOver, Policy, Task
from app.environment.wire import Limits
from app.errors import EngineLost
from app.rollout.episodes import EpisodeLimits, Episodes
from app.rollout.episodes.episode_group import episode_failures
from app.rollout.requests import Aborted
from app.rollout.rollouter import Rollouter
from app.types import Completion, Ending, FinishReason, GroupRequest, Sampling, Trajectory, VersionSpan
from tests.environment.characters import Characters
from tests.rollout.episodes import rollouter_with
from tests.simulated_environments import InProcessEnvironments
from tests.simulation import SimEngine, now, prompts, run_virtual, virtual

LIMIT = 64  # tokens of a trajectory
LIMITS = Limits(max_turns=99, max_turn_tokens=None, max_observation_tokens=999, timeout_s=1e6, episode_s=1e6)
Play = Callable[[Policy], Any]
Reply = Callable[[int], tuple[int, float]]  # of the n-th request: the tokens that it would sample, and its seconds


class Engine(SimEngine):
    """Samples as many tokens as `reply` says, or as it may. Records when each request is sent, and its bound."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(lambda _: 1.0, lambda prompt_id, member: True)
        self.reply = reply
        self.sent: list[tuple[float, int]] = []
        self.reserved = 0
        self.sampled = 0
        self.first = asyncio.Event()

    async def generate(self, request: GroupRequest) -> list[Completion]:
        most = request.sampling.max_tokens
        wanted, seconds = self.reply(len(self.sent))
        self.sent.append((now(), most))
        self.reserved += most
        self.first.set()
        assert self.sampled + self.reserved <= LIMIT, "more may be sampled than a trajectory has room for"

        self.seconds = lambda _: seconds
        try:
            (completion,) = await super().generate(request)
        finally:
            self.reserved -= most
        if completion.finish_reason is FinishReason.abort:
            return [completion]
        count = min(wanted, most)
        self.sampled += count
        tokens, logprobs = np.full(count, 65, dtype=np.int32), np.zeros(count, dtype=np.float32)
        reason = FinishReason.length if wanted >= most else FinishReason.stop
        return [Completion(tokens, logprobs, reason, (VersionSpan(self.version, 0, count),))]

    @staticmethod
    async def sampling(engines: Sequence["Engine"]) -> None:
        """Wait until half a second after the first request."""
        firsts = [asyncio.ensure_future(engine.first.wait()) for engine in engines]
        await asyncio.wait(firsts, return_when=asyncio.FIRST_COMPLETED)
        for each in firsts:
            each.cancel()
        await asyncio.sleep(0.5)


class Agent:
    def __init__(self, play: Play) -> None:
        self.play = play

    async def run(self, task: Task, policy: Policy) -> float:
        await self.play(policy)
        return 1.0


def rollouter_of(play: Play, engines: Sequence[Engine]) -> Rollouter:
    environments: Any = InProcessEnvironments(lambda: Agent(play), Characters(), LIMITS)
    failures = episode_failures(1.0, 9, lambda text: None)
    return rollouter_with(Episodes(environments, EpisodeLimits(64, LIMIT, 0), failures, seed=0), engines)


async def one(rollouter: Rollouter) -> Trajectory:
    group = await rollouter.group(prompts(1)[0], size=1, sampling=Sampling(1.0, 1.0, LIMIT), version=lambda: 0)
    assert len(group.trajectories) == 1
    return group.trajectories[0]


def at_once(count: int, **limits: Any) -> Play:
    """Ask for so many replies at the same time; those that find no room are left out."""

    async def play(policy: Policy) -> None:
        asks = (policy([{"role": "user", "content": f"q{number}"}], **limits) for number in range(count))
        outcomes = await asyncio.gather(*asks, return_exceptions=True)
        assert all(isinstance(each, EpisodeOver) for each in outcomes if isinstance(each, BaseException))

    return play


def test_the_staleness_of_a_group_begins_with_its_first_request_and_not_while_it_waits_for_a_worker() -> None:
    async def play(policy: Policy) -> None:
        await asyncio.sleep(5.0)
        await policy([{"role": "user", "content": "q"}], max_tokens=4)
        await policy([{"role": "user", "content": "r"}], max_tokens=4)

    sent: list[float] = []

    async def group() -> float:
        began = now()
        rollouter = rollouter_of(play, [Engine(lambda number: (4, 1.0))])
        sampling = Sampling(1.0, 1.0, LIMIT)
        on_sent = lambda: sent.append(now() - began)  # noqa: E731
        await rollouter.group(prompts(1)[0], size=2, sampling=sampling, version=lambda: 0, on_sent=on_sent)
        return now() - began

    assert run_virtual(group()) >= 7.0
    assert sent == [pytest.approx(5.0)]


@pytest.mark.parametrize("count", [1, 2, 8])
def test_a_trajectory_has_its_limit_however_many_replies_are_asked_for_at_once(count: int) -> None:
    engine = Engine(lambda number: (1000, 1.0))
    trajectory = run_virtual(one(rollouter_of(at_once(count), [engine])))
    assert trajectory.response_tokens == LIMIT
    assert trajectory.truncated
    assert trajectory.episode is not None
    assert trajectory.episode.ending is Ending.length
    assert [most for _, most in engine.sent] == [LIMIT]


def test_requests_wait_for_the_room_that_they_may_need_and_get_what_others_did_not_use() -> None:
    engine = Engine(lambda number: (10, 1.0 + number / 10))
    trajectory = run_virtual(one(rollouter_of(at_once(7, max_tokens=16), [engine])))
    assert trajectory.episode is not None
    measured = trajectory.episode.metrics
    assert 0 < measured["engine_seconds"] <= measured["wall_seconds"]  # requests at the same time count once
    # 4 · 16 are reserved; from 1.0 s to 1.3 s 4 · 10 are used, and 24 left; then 14, and at last 4
    begun = engine.sent[0][0]
    assert [(round(at - begun, 1), most) for at, most in engine.sent] == [
        *[(0.0, 16)] * 4,
        (1.2, 16),
        (2.6, 14),
        (4.1, 4),
    ]
    assert trajectory.response_tokens == 6 * 10 + 4
    assert trajectory.truncated


def test_replies_that_have_room_together_are_sampled_together() -> None:
    engine = Engine(lambda number: (8, 1.0))
    trajectory = run_virtual(one(rollouter_of(at_once(8, max_tokens=8), [engine])))
    assert engine.sent == [(engine.sent[0][0], 8)] * 8
    assert trajectory.response_tokens == LIMIT


@virtual
async def test_a_request_that_was_lost_with_its_engine_keeps_its_room_until_it_is_sampled() -> None:
    engines = [Engine(lambda number: (30, 1.0)), Engine(lambda number: (30, 1.0))]
    rollouter = rollouter_of(at_once(3, max_tokens=32), engines)

    playing = asyncio.create_task(one(rollouter))
    await Engine.sampling(engines)
    (busy,) = (engine for engine in engines if engine.sent)
    busy.die(EngineLost("engine was killed"))
    trajectory = await playing
    assert sorted(len(engine.sent) for engine in engines) == [2, 3]
    assert trajectory.response_tokens == 30 + 30 + 4


@virtual
async def test_an_abort_ends_those_that_wait_for_room_and_the_prompt_is_played_again() -> None:
    engine = Engine(lambda number: (60, 5.0))
    rollouter = rollouter_of(at_once(4), [engine])

    playing = asyncio.create_task(one(rollouter))
    await Engine.sampling([engine])
    await rollouter.abort(["sim/0"])
    with pytest.raises(Aborted):
        await playing
    trajectory = await one(rollouter)
    assert trajectory.response_tokens == LIMIT
    assert [most for _, most in engine.sent] == [LIMIT, LIMIT, 4]


Turn = tuple[int, int | None, int, float]  # observation, max_tokens, tokens that would be sampled, seconds before it
turns = st.tuples(st.integers(0, 12), st.none() | st.integers(1, 40), st.integers(1, 50), st.floats(0.0, 3.0))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(turns, min_size=1, max_size=4), min_size=1, max_size=5))
def test_any_conversations_at_once_end_within_the_limit(conversations: list[list[Turn]]) -> None:
    sampled = [turn[2] for turns in conversations for turn in turns]
    engine = Engine(lambda number: (sampled[number], 1.0))

    async def talk(policy: Policy, name: int, turns: list[Turn]) -> None:
        messages: list[Any] = [{"role": "user", "content": f"q{name}"}]
        for observation, max_tokens, _, seconds in turns:
            await asyncio.sleep(seconds)
            reply = await policy(messages, max_tokens=max_tokens)
            messages += [reply.message, {"role": "user", "content": "o" * observation}]

    async def play(policy: Policy) -> None:
        talks = [talk(policy, *each) for each in enumerate(conversations)]
        for ended in await asyncio.gather(*talks, return_exceptions=True):
            assert ended is None or isinstance(ended, EpisodeOver)

    trajectory = run_virtual(one(rollouter_of(play, [engine])))
    assert trajectory.response_tokens <= LIMIT
    assert trajectory.sampled_tokens == engine.sampled
    if engine.sampled < LIMIT and not trajectory.truncated:
        assert len(engine.sent) == len(sampled)  # each conversation came to its end
