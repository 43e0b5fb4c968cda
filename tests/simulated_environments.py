"""Environments whose turns, delays and failures are given, in place of the worker processes. In virtual time."""

import asyncio
import dataclasses
import inspect
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.environment.protocol import Task
from app.environment.wire import Answer, End, Limits, SampleRequest
from app.environment.worker.calls import Calls
from app.environment.worker.episode import Episode
from app.worker.remote import Job
from app.worker.wire import Begin, Close, Closed, Failed

OBSERVATION = [7, 8]


@dataclass(frozen=True)
class Script:
    """One attempt of an episode."""

    turns: int = 2
    seconds: float = 1.0  # of the environment's own code, before each turn and at the end
    fails_at: int | None = None  # the turn before which it fails
    kind: str = "raised"
    score: float = 1.0
    first: float | None = None  # seconds before the first turn, if others


def scripts(seed: int, *, turns: int = 4, seconds: float = 3.0, failing: float = 0.0) -> Callable[[Task, int], Script]:
    """Random episodes; the attempts of the members of a group differ. Evaluations never fail."""

    def script(task: Task, number: int) -> Script:
        rolls = random.Random(f"{seed}/{task.id}/{number}")
        count = rolls.randint(1, turns)
        fails = task.training and rolls.random() < failing
        return Script(
            count,
            rolls.uniform(0, seconds),
            rolls.randint(0, count) if fails else None,
            rolls.choice(("raised", "late", "died", "lost")),
            float(number % 2),
        )

    return script


@dataclass
class SimEnvironments:
    """`EnvironmentPool`'s part that the driver uses."""

    script: Callable[[Task, int], Script] = lambda task, number: Script(score=float(number % 2))
    sessions: list["SimSession"] = field(default_factory=list)

    async def begin(self, task: Task, prompt_ids: Sequence[int]) -> "SimSession":
        number = len(self.sessions)
        session = SimSession(number, task, prompt_ids, self.script(task, number))
        self.sessions.append(session)
        return session

    @property
    def open(self) -> list["SimSession"]:
        return [session for session in self.sessions if session.ended is None]


class SimSession:
    """The `Job` of a script."""

    def __init__(self, number: int, task: Task, prompt_ids: Sequence[int], script: Script) -> None:
        self.number = number
        self.task = task
        self.script = script
        self.ended: str | None = None
        self.closed = 0
        self.asked: list[tuple[SampleRequest, list[int]]] = []
        self._context = list(prompt_ids)
        self._turn = 0
        self._waiting: asyncio.Event | None = None
        self._asks = itertools.count()
        self._full = False

    async def next(self) -> SampleRequest | End | Failed:
        if self._waiting is not None:
            await self._waiting.wait()
        first = self.script.first if not self._turn else None
        await asyncio.sleep(self.script.seconds if first is None else first)
        if self._turn == self.script.fails_at:
            self.ended = "failed"
            return Failed(self.number, self.script.kind, "the environment failed on purpose.")
        if self._turn == self.script.turns or self._full:
            self.ended = "end"
            ending = "length" if self._full else "stop"
            return End(self.number, {"score": self.script.score}, ending, [], "1", {"tool_calls": 1.0})

        if self._turn:
            self._context += OBSERVATION
        self._turn += 1
        self._waiting = asyncio.Event()
        return SampleRequest(self.number, next(self._asks), 0, list(self._context), None, False)

    def reply(self, ask: SampleRequest, answer: Answer) -> None:
        assert self._waiting is not None
        self.asked.append((ask, list(answer.token_ids)))
        self._context += answer.token_ids
        self._full = answer.finish == "full"
        self._waiting.set()

    async def close(self, *, force: bool = False) -> None:
        self.closed += 1
        if self.ended is None:
            self.ended = "aborted"


class AtOnce(Calls):
    """Calls without a thread, from which virtual time runs away on a busy machine."""

    async def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        result = function(*args)
        return await result if inspect.isawaitable(result) else result


class InProcessEnvironments:
    """`EnvironmentPool` without the process: the worker's own episodes run on the loop of the driver."""

    def __init__(self, make: Callable[[], Any], renderer: Any, limits: Limits) -> None:
        self.make = make
        self.renderer = renderer
        self.limits = limits
        self.numbers = itertools.count()

    async def begin(self, task: Task, prompt_ids: Sequence[int]) -> Job:
        worker = _InProcessWorker()
        number = next(self.numbers)
        fields = {each.name: getattr(task, each.name) for each in dataclasses.fields(task)}
        session = Job(number, worker.send, lambda kind, text: None, lambda session: None)

        def ask(sequence: int, context: Sequence[int], limit: int | None, logprobs: bool) -> "asyncio.Future[Answer]":
            request = SampleRequest(number, next(self.numbers), sequence, context, limit, logprobs)
            worker.asks[request.number] = asyncio.get_running_loop().create_future()
            session.receive(request)
            return worker.asks[request.number]

        begin = Begin(number, {"task": fields, "prompt": list(prompt_ids)})
        worker.episode = Episode(begin, self.make, ask, self.renderer, self.limits, {}, lambda policy: "")
        worker.episode._calls = AtOnce()
        worker.playing = asyncio.create_task(worker.episode.play())

        def played(done: "asyncio.Task[Any]") -> None:
            if not done.cancelled():
                session.receive(done.result())

        worker.playing.add_done_callback(played)
        return session


class _InProcessWorker:
    episode: Episode
    playing: "asyncio.Task[End | Failed | Closed]"

    def __init__(self) -> None:
        self.asks: dict[int, asyncio.Future[Answer]] = {}

    def send(self, message: Any) -> None:
        match message:
            case Answer():
                self.asks.pop(message.number).set_result(message)
            case Close():
                self.episode.abort(force=message.force)
