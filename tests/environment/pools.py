"""Pools whose workers run an environment written in a test."""

import asyncio
import contextlib
import itertools
import os
import shutil
import textwrap
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from app.environment.pool import EnvironmentPool, EnvironmentSpec
from app.environment.protocol import Task
from app.environment.wire import Answer, End, Limits, RendererChoice, SampleRequest
from app.worker.remote import Job
from app.worker.wire import Failed
from tests.environment.characters import text_of, tokens

PATIENCE_S = 60.0  # for anything that should happen
_modules = itertools.count()


@dataclass
class Maker:
    """Makes specs of environments that a test writes."""

    folder: Path

    def __call__(
        self,
        source: str,
        *,
        name: str = "Env",
        args: dict | None = None,
        python: str | None = None,
        memory_gib: float = 8.0,
        model: Path | None = None,
        **limits: Any,
    ) -> EnvironmentSpec:
        """The spec; `model` has a tokenizer for plain text, in place of a renderer of characters."""
        module = f"environment_of_a_test_{os.getpid()}_{next(_modules)}"  # unique in this session
        shutil.copy(Path(__file__).with_name("characters.py"), self.folder)
        head = "" if model else "import characters\ncharacters.install()\n"
        (self.folder / f"{module}.py").write_text(head + textwrap.dedent(source))
        chosen = replace(Limits(8, None, max_observation_tokens=100, timeout_s=30.0, episode_s=100.0), **limits)
        environment = {"kind": "own", "target": f"{module}.{name}", "args": args or {}}
        renderer = RendererChoice("plain" if model else "characters", str(model or ""), "template")
        return EnvironmentSpec(environment, renderer, chosen, memory_gib, python)


@dataclass
class Played:
    """What an episode asked for, and how it ended."""

    end: End | Failed
    texts: list[tuple[int, str]] = field(default_factory=list)  # sequence and appended text of each request

    @property
    def scored(self) -> End:
        assert isinstance(self.end, End), self.end
        return self.end

    @property
    def failed(self) -> Failed:
        assert isinstance(self.end, Failed), self.end
        return self.end


Says = Callable[[SampleRequest], tuple[str, str]]  # text and finish of the reply to a request


def script(*replies: str) -> Says:
    """Reply with these, in order; then with nothing, because nothing has room."""
    left = iter(replies)

    def say(ask: SampleRequest) -> tuple[str, str]:
        reply = next(left, None)
        return ("", "full") if reply is None else (reply, "stop")

    return say


async def play(session: Job, say: Says) -> Played:
    """Answer all requests of an episode until it ends."""
    texts: list[tuple[int, str]] = []
    sequences: dict[int, str] = {}
    while isinstance(event := await asyncio.wait_for(session.next(), PATIENCE_S), SampleRequest):
        context, before = text_of(event.context), sequences.get(event.sequence, "")
        assert context.startswith(before)
        texts.append((event.sequence, context.removeprefix(before)))

        text, finish = say(event)
        sequences[event.sequence] = context + text
        session.reply(event, Answer(event.number, tokens(text), finish, [-0.5] * len(text) if event.logprobs else None))
    return Played(event, texts)


async def play_one(pool: EnvironmentPool, *replies: str, task: Task | None = None) -> Played:
    """Begin an episode whose prompt is `6*7=`, and play it."""
    session = await asyncio.wait_for(pool.begin(task or a_task(), tokens("6*7=")), PATIENCE_S)
    return await play(session, script(*replies))


def a_task(**changes: Any) -> Task:
    fields = {"id": "set/0@0", "question": "6*7=", "answer": "42", "source": "set", "row": {"n": 1}, "seed": 3}
    return Task(**{**fields, "training": True, **changes})


@contextlib.asynccontextmanager
async def running_pool(
    spec: EnvironmentSpec,
    *,
    workers: int = 1,
    episodes: int = 4,
    log: Path | None = None,
    warn: Callable[[str], None] | None = None,
) -> AsyncIterator[EnvironmentPool]:
    """A pool that has started; afterwards no process and no descriptor of it is left."""
    before = set(os.listdir("/proc/self/fd"))
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    pool = EnvironmentPool(spec, workers=workers, episodes=episodes, log=log, warn=warn or (lambda sentence: None))
    try:
        await pool.start()
        yield pool
    finally:
        pool.close()
        await asyncio.sleep(0)  # transports close their sockets in the next round of the loop
        await asyncio.sleep(0)
    left = [each for each in psutil.Process().children(recursive=True) if each.pid not in children]
    assert left == []
    assert set(os.listdir("/proc/self/fd")) - before == set()
