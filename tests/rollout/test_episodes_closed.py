"""Real environment workers under a group: each environment is closed exactly once, however its episode ends."""

import asyncio
import gc
import warnings
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from app.environment.pool import EnvironmentSpec
from app.errors import EngineError
from app.rollout.requests import Aborted
from app.rollout.rollouter import Rollouter
from app.types import Group, GroupRequest
from tests.environment.pools import Maker
from tests.rollout.episodes import Scripted, group, prompt, rollouter_of
from tests.waiting import alive, until

# Writes a line for each call. `waits`: a step stays until the file `go` exists, on the worker's loop or in a thread.
DIARY = """
import asyncio, itertools, os, pathlib, time

numbers = itertools.count()

class Env:
    def __init__(self, folder, turns=2, waits=False):
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
        observation = self.said_more()
        while self.stays():
            await asyncio.sleep(0.01)
        return observation
    def said_more(self):
        self.said += 1
        self.note("step")
        return None if self.said == self.turns else f"more {self.said}"
    def stays(self):
        return self.waits and not (self.folder / "go").exists()
    def score(self):
        self.note("score")
        return float(self.said)
    def close(self):
        self.note("close")

class InThread(Env):
    def step(self, reply):
        observation = self.said_more()
        while self.stays():
            time.sleep(0.01)
        return observation

class Blocking(InThread):
    async def step(self, reply):
        return super().step(reply)
"""


class Diary:
    """What the environments of a folder wrote."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "diary"

    @property
    def counts(self) -> Counter[str]:
        return Counter(line.split()[0] for line in self._lines)

    async def wait_for_steps(self, count: int) -> None:
        await asyncio.to_thread(until, lambda: self.counts["step"] >= count, 60)

    def assert_closed_once(self, episodes: int) -> None:
        """Every environment that was made was closed once."""
        closed = Counter(line.split()[1] for line in self._lines if line.startswith("close"))
        made = Counter(line.split()[1] for line in self._lines if line.startswith("made"))
        assert closed == made
        assert sum(made.values()) == len(made) == episodes

    @property
    def _lines(self) -> list[str]:
        return self.path.read_text().splitlines() if self.path.exists() else []


@asynccontextmanager
async def playing(spec: EnvironmentSpec, engine: Scripted) -> AsyncIterator[tuple[Rollouter, "asyncio.Task[Group]"]]:
    """A group of four that is being played."""
    async with rollouter_of(spec, [engine]) as rollouter:
        task = asyncio.create_task(group(rollouter, prompt()))
        try:
            async with asyncio.timeout(60):
                yield rollouter, task
        finally:
            await asyncio.gather(task, return_exceptions=True)


def test_a_group_that_is_cancelled_at_once_asks_for_nothing(own: Maker, tmp_path: Path) -> None:
    async def run() -> None:
        async with playing(own(DIARY, args={"folder": str(tmp_path)}), Scripted()) as (_, played):
            await asyncio.sleep(0)
            played.cancel()
            with pytest.raises(asyncio.CancelledError):
                await played

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a coroutine that was never awaited
        asyncio.run(run())
        gc.collect()
    Diary(tmp_path).assert_closed_once(Diary(tmp_path).counts["made"])
    assert Diary(tmp_path).counts["step"] == 0


@pytest.mark.parametrize("name", ["Env", "InThread"])
@pytest.mark.parametrize("how", ["cancel", "abort"])
async def test_a_group_that_is_ended_inside_its_environments_closes_them(
    how: str, name: str, own: Maker, tmp_path: Path
) -> None:
    """Cancelled as at an interrupt, or aborted as stale. A step in a thread ends by itself first."""
    spec = own(DIARY, name=name, args={"folder": str(tmp_path), "waits": True})
    engine, diary = Scripted(), Diary(tmp_path)

    async with playing(spec, engine) as (rollouter, played):
        await diary.wait_for_steps(4)
        if how == "cancel":
            played.cancel()
        else:
            await rollouter.abort(["talk/0@0"])
        if name == "InThread":
            (tmp_path / "go").touch()
        with pytest.raises(asyncio.CancelledError if how == "cancel" else Aborted):
            await played
        diary.assert_closed_once(4)
    assert engine.aborted == (["talk/0@0"] if how == "abort" else [])
    assert diary.counts == {"made": 4, "begin": 4, "step": 4, "close": 4}


@pytest.mark.parametrize("name", ["InThread", "Blocking"])
async def test_a_cancelled_group_does_not_wait_for_a_plain_step_until_its_deadline(
    name: str, own: Maker, tmp_path: Path
) -> None:
    """As at Ctrl-C: a step in a thread, or one that blocks the worker's loop, would stay for an hour."""
    spec = own(DIARY, name=name, args={"folder": str(tmp_path), "waits": True}, timeout_s=3600.0)

    async with playing(spec, Scripted()) as (rollouter, played):
        assert rollouter.episodes is not None
        environments = rollouter.episodes.environments
        (worker,) = environments.pids
        await Diary(tmp_path).wait_for_steps(4 if name == "InThread" else 1)
        played.cancel()
        with pytest.raises(asyncio.CancelledError):
            await played

        await asyncio.to_thread(until, lambda: not alive(worker), 60)
        assert environments.pids == []
        assert environments.counts["restarts"] == 0  # nothing starts while the run ends
        (tmp_path / "go").touch()
        again = await group(rollouter, prompt(1))
        assert again.rewards.tolist() == [2.0] * 4
        assert environments.counts["restarts"] == 1
    if name == "InThread":
        Diary(tmp_path).assert_closed_once(8)


async def test_a_group_whose_engine_refuses_a_turn_closes_its_environments(own: Maker, tmp_path: Path) -> None:
    async def refuse(request: GroupRequest) -> None:
        if request.turn.startswith("2 of") and request.turn.endswith("member 1"):
            raise EngineError("refused on purpose")

    async with playing(own(DIARY, args={"folder": str(tmp_path)}), Scripted(before=refuse)) as (_, played):
        with pytest.raises(EngineError, match="refused on purpose"):
            await played
        Diary(tmp_path).assert_closed_once(4)
