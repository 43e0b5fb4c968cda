"""The timeline has a lane of what environments do on their own, between two turns of an engine."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from app.environment.wire import End, SampleRequest
from app.rollout.episodes import EpisodeLimits, Episodes, GroupSpec
from app.rollout.episodes.attempt import MIN_SHOWN_S
from app.rollout.episodes.player import episode_failures
from app.tracking.run_folder.timeline import Span, Timeline
from app.types import Completion, FinishReason, Prompt, Sampling, VersionSpan
from tests.simulation import now, virtual

SLOW_S = 5 * MIN_SHOWN_S
PROMPT = Prompt("game/1@0", np.array([1, 2], np.int32), "42", "game")
COMPLETION = Completion(
    np.array([3], np.int32), np.array([-0.5], np.float32), FinishReason.stop, (VersionSpan(0, 0, 1),)
)


class Session:
    """Asks after a slow beginning, again at once after the first answer, and ends slowly after the second."""

    number = 0

    def __init__(self) -> None:
        self.answers: asyncio.Queue[None] = asyncio.Queue()
        self.turns = 0

    async def next(self) -> SampleRequest | End:
        self.turns += 1
        if self.turns > 1:
            await self.answers.get()
        if self.turns != 2:
            await asyncio.sleep(SLOW_S)
        return (
            End(0, {"found": 1.0}, "stop", [], "42", {})
            if self.turns == 3
            else SampleRequest(0, 0, 0, [1, 2], None, False)
        )

    def answer(self, ask: SampleRequest, token_ids: Any, finish: str, logprobs: Any = None) -> None:
        self.answers.put_nowait(None)

    async def close(self, *, at_once: bool = False) -> None: ...


class VirtualTimeline(Timeline):
    """Its clock is the event loop's."""

    def now(self) -> float:
        return now()


class Pool:
    """Engines that take long."""

    @contextmanager
    def sticky_engine(self, size: int) -> Iterator[Any]:
        yield SimpleNamespace(engine=None)


@virtual
async def test_a_slow_stretch_of_an_environment_is_a_span_and_neither_a_fast_one_nor_an_engines_turn_is() -> None:
    spans: list[Span] = []

    async def send(*_: Any) -> list[Completion]:
        await asyncio.sleep(SLOW_S)
        return [COMPLETION]

    async def begin(*_: Any) -> Session:
        return Session()

    timeline = VirtualTimeline()
    environments: Any = SimpleNamespace(begin=begin)
    failures = episode_failures(0.1, 4, lambda text: None)
    episodes = Episodes(environments, EpisodeLimits(8, 64, 0), failures, seed=0)
    requests: Any = SimpleNamespace(timeline=timeline, send=send)
    pool: Any = Pool()
    await episodes.play(GroupSpec(PROMPT, 1, Sampling(1.0, 1.0, 64), lambda: 0, True), pool, requests)
    spans.extend(timeline._spans)
    assert [(span.track, span.name) for span in spans] == [("environment", "game/1@0 member 0")] * 2
    assert [span.end - span.start for span in spans] == pytest.approx([SLOW_S, SLOW_S])
    assert spans[1].start - spans[0].end == pytest.approx(2 * SLOW_S)  # two turns of the engine
