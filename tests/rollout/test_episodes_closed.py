"""Real environment workers under a group: each environment is closed exactly once, however its episode ends."""

import asyncio
import gc
import warnings
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.errors import EngineError, EngineLost
from app.rollout.requests import Aborted
from app.rollout.rollouter import Rollouter
from app.types import Completion, Ending, Group, GroupRequest
from tests.rollout.episodes import ROOM, Scripted, group, pieces, prompt, rollouter_of
from tests.waiting import until

# Writes a line for each call. `waits`: a step, or an async step, in which it stays until the file `go` exists.
DIARY = """
import asyncio, itertools, os, pathlib, time

numbers = itertools.count()

class Env:
    def __init__(self, folder, turns=2, waits=None):
        self.folder, self.turns, self.waits = pathlib.Path(folder), turns, waits
        self.name = f"{os.getpid()}-{next(numbers)}"
        self.note("made")
    def note(self, what):
        with (self.folder / "diary").open("a") as diary:
            diary.write(f"{what} {self.name}\\n")
    def begin(self, task):
        self.note("begin")
        self.said = 0
    async def step(self, reply):
        self.said += 1
        self.note("step")
        while self.waits == "async" and not (self.folder / "go").exists():
            await asyncio.sleep(0.01)
        if self.waits == "thread":
            await asyncio.get_running_loop().run_in_executor(None, self.stay)
        return None if self.said == self.turns else f"more {self.said}"
    def stay(self):
        while not (self.folder / "go").exists():
            time.sleep(0.01)
    def score(self):
        self.note("score")
        return float(self.said)
    def close(self):
        self.note("close")

class Blocking(Env):
    async def step(self, reply):
        self.said += 1
        self.note("step")
        self.stay()
        return None if self.said == self.turns else f"more {self.said}"

class InThread(Env):
    def step(self, reply):
        self.said += 1
        self.note("step")
        if self.waits:
            self.stay()
        return None if self.said == self.turns else f"more {self.said}"
"""


class Diary:
    """What the environments of a folder wrote."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "diary"

    def count(self, what: str) -> int:
        return self.counts[what]

    @property
    def counts(self) -> Counter[str]:
        return Counter(line.split()[0] for line in self._lines)

    def assert_closed_once(self, episodes: int) -> None:
        """Every environment that was made was closed once."""
        closed = Counter(line.split()[1] for line in self._lines if line.startswith("close"))
        made = Counter(line.split()[1] for line in self._lines if line.startswith("made"))
        assert closed == made
        assert sum(made.values()) == len(made) == episodes

    @property
    def _lines(self) -> list[str]:
        return self.path.read_text().splitlines() if self.path.exists() else []


Story = Callable[[Rollouter, "asyncio.Task[Group]", Diary], Awaitable[Any]]


def play(spec: Any, engine: Any, folder: Path, story: Story, room: int = ROOM) -> Any:
    """Begin a group of four, and do to it what the story does."""

    async def run() -> Any:
        async with rollouter_of(spec, [engine]) as rollouter:
            playing = asyncio.create_task(group(rollouter, prompt(), room=room))
            try:
                return await asyncio.wait_for(story(rollouter, playing, Diary(folder)), 60)
            finally:
                await asyncio.gather(playing, return_exceptions=True)

    return asyncio.run(run())


async def its_end(rollouter: Rollouter, playing: "asyncio.Task[Group]", diary: Diary) -> Group:
    return await playing


def has_ended(process: int) -> bool:
    try:
        return bool(psutil.Process(process).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


async def steps(diary: Diary, count: int) -> None:
    await asyncio.to_thread(until, lambda: diary.count("step") >= count, 60)


def test_an_episode_that_ends_is_scored_and_closed(own: Any, tmp_path: Path) -> None:
    played = play(own(DIARY, args={"folder": str(tmp_path)}), Scripted(), tmp_path, its_end)
    assert played.rewards.tolist() == [2.0] * 4
    assert Diary(tmp_path).counts == {"made": 4, "begin": 4, "step": 8, "score": 4, "close": 4}
    Diary(tmp_path).assert_closed_once(4)


def test_an_episode_that_runs_out_of_turns_is_scored_and_closed(own: Any, tmp_path: Path) -> None:
    spec = own(DIARY, args={"folder": str(tmp_path), "turns": 9}, max_turns=3)
    played = play(spec, Scripted(), tmp_path, its_end)
    assert {t.episode.ending for t in played.trajectories if t.episode} == {Ending.turns}
    assert played.rewards.tolist() == [3.0] * 4
    Diary(tmp_path).assert_closed_once(4)


def test_an_episode_that_runs_out_of_tokens_is_scored_and_closed(own: Any, tmp_path: Path) -> None:
    spec = own(DIARY, args={"folder": str(tmp_path), "turns": 9})

    played = play(spec, Scripted(), tmp_path, its_end, room=20)
    assert {t.episode.ending for t in played.trajectories if t.episode} == {Ending.length}
    assert all(t.response_tokens <= 20 for t in played.trajectories)
    Diary(tmp_path).assert_closed_once(4)


def test_a_group_that_is_cancelled_at_once_asks_for_nothing(own: Any, tmp_path: Path) -> None:
    async def story(rollouter: Rollouter, playing: "asyncio.Task[Group]", diary: Diary) -> None:
        await asyncio.sleep(0)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a coroutine that was never awaited
        play(own(DIARY, args={"folder": str(tmp_path)}), Scripted(), tmp_path, story)
        gc.collect()
    Diary(tmp_path).assert_closed_once(Diary(tmp_path).count("made"))
    assert Diary(tmp_path).count("step") == 0


@pytest.mark.parametrize(("name", "waits"), [("Env", "async"), ("InThread", "thread")])
@pytest.mark.parametrize("how", ["cancel", "abort"])
def test_a_group_that_is_ended_inside_its_environments_closes_them(
    how: str, name: str, waits: str, own: Any, tmp_path: Path
) -> None:
    """Cancelled as at an interrupt, or aborted as stale. A step in a thread ends by itself first."""
    spec = own(DIARY, name=name, args={"folder": str(tmp_path), "waits": waits})
    engine = Scripted()

    async def story(rollouter: Rollouter, playing: "asyncio.Task[Group]", diary: Diary) -> None:
        await steps(diary, 4)
        if how == "cancel":
            playing.cancel()
        else:
            await rollouter.abort(["talk/0@0"])
        if waits == "thread":
            (tmp_path / "go").touch()
        with pytest.raises(asyncio.CancelledError if how == "cancel" else Aborted):
            await playing
        diary.assert_closed_once(4)

    play(spec, engine, tmp_path, story)
    assert engine.aborted == (["talk/0@0"] if how == "abort" else [])
    assert Diary(tmp_path).counts == {"made": 4, "begin": 4, "step": 4, "close": 4}


@pytest.mark.parametrize("waits", ["thread", "loop"])
def test_a_cancelled_group_does_not_wait_for_a_plain_step_until_its_deadline(
    waits: str, own: Any, tmp_path: Path
) -> None:
    """As at Ctrl-C: a step in a thread, or one that blocks the worker's loop, would stay for an hour."""
    name = {"thread": "InThread", "loop": "Blocking"}[waits]
    spec = own(DIARY, name=name, args={"folder": str(tmp_path), "waits": waits}, timeout_s=3600.0)

    async def story(rollouter: Rollouter, playing: "asyncio.Task[Group]", diary: Diary) -> None:
        assert rollouter.episodes is not None
        environments = rollouter.episodes.environments
        (worker,) = environments.pids
        await steps(diary, 4 if waits == "thread" else 1)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

        await asyncio.to_thread(until, lambda: has_ended(worker), 60)
        assert environments.pids == []
        assert environments.counts["restarts"] == 0  # nothing starts while the run ends
        (tmp_path / "go").touch()
        again = await group(rollouter, prompt(1))
        assert again.rewards.tolist() == [2.0] * 4
        assert environments.counts["restarts"] == 1

    play(spec, Scripted(), tmp_path, story)
    if waits == "thread":
        Diary(tmp_path).assert_closed_once(8)


def test_a_group_that_is_aborted_while_engines_sample_closes_its_environments(own: Any, tmp_path: Path) -> None:
    async def for_ever(request: GroupRequest) -> None:
        if not request.turn.startswith("1 of"):
            await asyncio.Event().wait()

    async def story(rollouter: Rollouter, playing: "asyncio.Task[Group]", diary: Diary) -> Aborted:
        await steps(diary, 4)
        await rollouter.abort(["talk/0@0"])
        with pytest.raises(Aborted) as aborted:
            await playing
        diary.assert_closed_once(4)
        return aborted.value

    spec = own(DIARY, args={"folder": str(tmp_path)})
    aborted = play(spec, Scripted(before=for_ever), tmp_path, story)
    assert aborted.tokens == 4 * len("42")


def test_a_group_whose_engine_refuses_a_turn_closes_its_environments(own: Any, tmp_path: Path) -> None:
    async def refuse(request: GroupRequest) -> None:
        if request.turn.startswith("2 of") and request.turn.endswith("member 1"):
            raise EngineError("refused on purpose")

    async def story(rollouter: Rollouter, playing: "asyncio.Task[Group]", diary: Diary) -> None:
        with pytest.raises(EngineError, match="refused on purpose"):
            await playing
        diary.assert_closed_once(4)

    play(own(DIARY, args={"folder": str(tmp_path)}), Scripted(before=refuse), tmp_path, story)


@dataclass
class Mortal(Scripted):
    """Dies when the second turns of all members are in flight."""

    waiting: int = 0
    dead: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, request: GroupRequest) -> list[Completion]:
        if self.dead.is_set():
            raise EngineLost("engine 0 was killed")
        if request.turn.startswith("2 of"):
            self.waiting += 1
            if self.waiting == 4:
                self.dead.set()
            await self.dead.wait()
            raise EngineLost("engine 0 was killed")
        return await super().generate(request)


async def test_an_engine_that_dies_in_the_second_turn_costs_only_that_turn(own: Any, tmp_path: Path) -> None:
    engines = [Mortal("4"), Scripted("987")]
    spec = own(DIARY, args={"folder": str(tmp_path), "turns": 3})

    async with rollouter_of(spec, engines) as rollouter:
        played = await group(rollouter, prompt())
    assert Diary(tmp_path).counts == {"made": 4, "begin": 4, "step": 12, "score": 4, "close": 4}
    assert [len(engine.asked) for engine in engines] == [4, 8]
    for trajectory in played.trajectories:
        (sequence,) = trajectory.sequences
        assert "".join(map(chr, sequence.token_ids)) == "6*7=4|more 1>987|more 2>987"
        assert pieces(sequence) == [(4, 5), (13, 16), (24, 27)]
        assert len(sequence.logprobs) == sequence.spans[-1].end == 7
