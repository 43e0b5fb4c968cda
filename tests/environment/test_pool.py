import asyncio
from pathlib import Path

import psutil
import pytest

from app.environment.wire import Answer, End, SampleRequest
from app.errors import RunError
from tests.environment.characters import text_of, tokens
from tests.environment.pools import PATIENCE_S, Maker, a_task, play, play_one, running_pool, script
from tests.waiting import until

GUESS = """
class Env:
    def begin(self, task):
        self.answer = task.answer
        self.found = False
    def step(self, reply):
        self.found = reply.text == self.answer
        return None if self.found else f"not {reply.text}"
    def score(self):
        return {"found": self.found, "half": 0.5}
"""


async def test_an_episode_asks_for_turns_and_ends_with_scores(own: Maker) -> None:
    async with running_pool(own(GUESS)) as pool:
        played, counts = await play_one(pool, "7", "42"), pool.counts
    assert played.texts == [(0, "6*7="), (0, "|not 7>")]
    assert played.scored.scores == {"found": 1.0, "half": 0.5}
    assert list(played.scored.scores) == ["found", "half"]
    assert played.scored.ending == "stop"
    assert played.scored.text == "42"
    assert [(turn["role"], turn["text"], turn["tokens"]) for turn in played.scored.turns] == [
        ("user", "6*7=", 4),
        ("assistant", "7", 1),
        ("user", "not 7", 7),
        ("assistant", "42", 2),
    ]
    assert played.scored.metrics["observation_tokens"] == 7.0
    assert counts == {"restarts": 0}


CLOSING = """
import time
class Env:
    def __init__(self, folder):
        self.folder = folder
    def begin(self, task):
        self.id = task.id
        self.note("began")
        if task.row.get("wait"): self.until("go")
    def step(self, reply): return "more" if reply.text != "end" else None
    def score(self): return 1
    def close(self): self.note("closed")
    def note(self, event):
        with open(f"{self.folder}/notes", "a") as file: print(event, self.id, file=file, flush=True)
    def until(self, name):
        import os
        while not os.path.exists(f"{self.folder}/{name}"): time.sleep(0.01)
class SlowToMake(Env):
    def __init__(self, folder):
        self.folder, self.id = folder, "making"
        self.note("began")
        self.until("go")
"""


def notes(folder: Path) -> list[str]:
    path = folder / "notes"
    return path.read_text().splitlines() if path.exists() else []


async def test_an_episode_is_closed_once_however_it_ends_well(own: Maker, tmp_path: Path) -> None:
    replies = {"stop": ["a", "end"], "turns": ["a", "a"], "length": ["a"]}
    async with running_pool(own(CLOSING, args={"folder": str(tmp_path)}, max_turns=2)) as pool:
        ends = [(await play_one(pool, *said)).scored for said in replies.values()]
    assert [(end.ending, end.scores) for end in ends] == [(ending, {"score": 1.0}) for ending in replies]
    assert notes(tmp_path) == ["began set/0@0", "closed set/0@0"] * 3


async def test_a_truncated_last_reply_ends_the_episode_as_length(own: Maker) -> None:
    spec = own("class Env:\n    def begin(self, task): ...\n    def step(self, reply): assert reply.truncated")

    async with running_pool(spec) as pool:
        end = (await play(await pool.begin(a_task(), tokens("q")), lambda ask: ("ab", "length"))).scored
    assert (end.ending, end.scores) == ("length", {})


async def test_an_aborted_episode_whose_step_hangs_is_closed_and_its_worker_replaced(
    own: Maker, tmp_path: Path
) -> None:
    spec = own(CLOSING, args={"folder": str(tmp_path)}, timeout_s=0.5)

    async with running_pool(spec) as pool:
        session = await pool.begin(a_task(row={"wait": True}), tokens("q"))
        await asyncio.to_thread(until, lambda: bool(notes(tmp_path)), PATIENCE_S)
        await asyncio.wait_for(session.close(), PATIENCE_S)
        end, restarts = (await play_one(pool, "end")).end, pool.restarts
    assert isinstance(end, End)
    assert restarts == 1
    assert notes(tmp_path)[:2] == ["began set/0@0", "closed set/0@0"]


async def test_a_worker_that_does_not_close_an_aborted_episode_is_killed(
    own: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.worker.remote.ABORT_TIMEOUT_S", 0.0)
    spec = own(
        """
        import time
        class Env:
            async def run(self, task, policy):
                await policy(None)
                open(task.row["file"], "w")
                time.sleep(1e6)
        """,
        timeout_s=0.5,
    )
    blocked = tmp_path / "blocked"

    async with running_pool(spec) as pool:
        session = await pool.begin(a_task(row={"file": str(blocked)}), tokens("q"))
        ask = await asyncio.wait_for(session.next(), PATIENCE_S)
        session.reply(ask, Answer(ask.number, tokens("x"), "stop"))
        await asyncio.to_thread(until, blocked.exists, PATIENCE_S)
        await asyncio.wait_for(session.close(), PATIENCE_S)
        failed, counts = await session.next(), pool.counts
    assert (failed.kind, failed.text) == ("late", "an aborted job did not end")
    assert counts == {"late": 1, "restarts": 1}


async def test_an_episode_that_waits_for_a_place_gets_one_after_a_cancelled_one_whose_step_hangs(
    own: Maker, tmp_path: Path
) -> None:
    spec = own(CLOSING, args={"folder": str(tmp_path)}, timeout_s=3600.0)

    async with running_pool(spec, episodes=1) as pool:
        session = await pool.begin(a_task(id="begins", row={"wait": True}), tokens("q"))
        await asyncio.to_thread(until, lambda: len(notes(tmp_path)) == 1, PATIENCE_S)
        waiting = asyncio.ensure_future(play_one(pool, "end"))
        await asyncio.sleep(0)
        await asyncio.wait_for(session.close(force=True), PATIENCE_S)
        end, counts = (await waiting).end, pool.counts
    assert isinstance(end, End)
    assert counts == {"restarts": 1}
    assert notes(tmp_path) == ["began begins", "closed begins", "began set/0@0", "closed set/0@0"]


async def test_a_worker_whose_episodes_were_cancelled_is_replaced_although_another_one_has_room(
    own: Maker, tmp_path: Path
) -> None:
    spec = own(CLOSING, args={"folder": str(tmp_path)}, timeout_s=3600.0)

    async with running_pool(spec, workers=2) as pool:
        session = await pool.begin(a_task(id="begins", row={"wait": True}), tokens("q"))
        await asyncio.to_thread(until, lambda: len(notes(tmp_path)) == 1, PATIENCE_S)
        await asyncio.wait_for(session.close(force=True), PATIENCE_S)
        assert pool.counts == {"restarts": 0}
        assert isinstance((await play_one(pool, "end")).end, End)
        await asyncio.sleep(0)
        assert pool.counts == {"restarts": 1}


async def test_episodes_wait_for_a_place_and_are_spread_over_the_workers(own: Maker) -> None:
    spec = own(
        "import os\nclass Env:\n    def begin(self, task): return str(os.getpid())\n    def step(self, reply): ..."
    )

    async with running_pool(spec, workers=2, episodes=2) as pool:
        sessions = [await pool.begin(a_task(), tokens("q")) for _ in range(4)]
        asks = [await asyncio.wait_for(session.next(), PATIENCE_S) for session in sessions]
        waiting = [asyncio.ensure_future(pool.begin(a_task(), tokens("q"))) for _ in range(3)]
        cancelled = waiting.pop(0)
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.sleep(0.1)
        assert not any(each.done() for each in waiting)

        for session, ask in zip(sessions, asks, strict=True):
            session.reply(ask, Answer(ask.number, tokens("x"), "stop"))
            assert isinstance(await asyncio.wait_for(session.next(), PATIENCE_S), End)
        for each in waiting:
            await play(await asyncio.wait_for(each, PATIENCE_S), script("y"))
        seen, pids = [text_of(ask.context) for ask in asks], [f"{pid}>" for pid in pool.pids]
    assert sorted(seen) == sorted(pids * 2)


async def test_one_worker_plays_sixty_four_episodes_at_once(own: Maker) -> None:
    spec = own("import time\nclass Env:\n    def begin(self, task): time.sleep(0.2)\n    def step(self, reply): ...")

    async with running_pool(spec, episodes=64) as pool:
        (pid,) = pool.pids
        idle = psutil.Process(pid).num_threads()
        await asyncio.gather(*(play_one(pool, "a") for _ in range(128)))
        await asyncio.to_thread(until, lambda: psutil.Process(pid).num_threads() <= idle, PATIENCE_S)
        counts, descriptors = pool.counts, psutil.Process(pid).num_fds()
    assert counts == {"restarts": 0}
    assert descriptors < 20


async def test_closing_the_pool_ends_episodes_and_those_that_wait(own: Maker) -> None:
    spec = own(GUESS)

    async with running_pool(spec, episodes=1) as pool:
        session = await pool.begin(a_task(), tokens("q"))
        waiting = asyncio.ensure_future(pool.begin(a_task(), tokens("q")))
        await asyncio.sleep(0)
        assert isinstance(await session.next(), SampleRequest)
        pool.close()
        pool.close()
        with pytest.raises(RunError, match="The workers of the environment are closed"):
            await waiting
        await session.close()
        assert (await session.next()).kind == "lost"


async def test_an_environment_that_drives_and_limits_itself_scores_and_has_metrics(own: Maker) -> None:
    spec = own(
        """
        import asyncio
        class Env:
            limits_itself = True
            def __init__(self): self.metrics = {"tool_failures": 5}
            async def run(self, task, policy):
                policy.count("things", 2)
                await policy(None)
                if task.row["do"] == "limit": await policy(None)
                await asyncio.sleep(0.8)  # longer than a step may take
                return {"none": None, "names": {"b": 1, "a": 0}}[task.row["do"]]
        """,
        max_turns=1,
        timeout_s=0.5,
    )

    async with running_pool(spec) as pool:
        acts = ("none", "names", "limit")
        none, names, limit = [(await play_one(pool, "x", task=a_task(row={"do": do}))).scored for do in acts]
    assert (none.scores, none.ending) == ({}, "stop")
    assert (list(names.scores.items()), names.ending) == ([("b", 1.0), ("a", 0.0)], "stop")
    assert (limit.scores, limit.ending) == ({"score": 0.0}, "turns")
    assert (names.metrics["things"], names.metrics["tool_failures"]) == (2.0, 5.0)


async def test_an_episode_counts_only_the_time_of_its_own_code(own: Maker) -> None:
    spec = own(
        """
        import time
        class Env:
            def begin(self, task): ...
            def step(self, reply):
                time.sleep(0.4)
                return "more"
        """,
        timeout_s=20.0,
        episode_s=0.3,
    )

    async with running_pool(spec) as pool:
        session = await pool.begin(a_task(), tokens("q"))
        ask = await asyncio.wait_for(session.next(), PATIENCE_S)
        await asyncio.sleep(0.4)  # the engine's time
        session.reply(ask, Answer(ask.number, tokens("x"), "stop"))
        end = await asyncio.wait_for(session.next(), PATIENCE_S)
    assert (end.ending, len(end.turns)) == ("time", 2)
    assert end.metrics["seconds"] >= 0.4
    assert end.turns[1]["seconds"] >= 0.3  # of the engine


async def test_an_environment_whose_constructor_ran_while_its_episode_was_aborted_is_closed(
    own: Maker, tmp_path: Path
) -> None:
    async with running_pool(own(CLOSING, name="SlowToMake", args={"folder": str(tmp_path)})) as pool:
        session = await pool.begin(a_task(), tokens("q"))
        await asyncio.to_thread(until, lambda: bool(notes(tmp_path)), PATIENCE_S)
        closing = asyncio.ensure_future(session.close())
        await asyncio.sleep(0.05)
        (tmp_path / "go").touch()
        await asyncio.wait_for(closing, PATIENCE_S)
        assert pool.counts == {"restarts": 0}
    assert notes(tmp_path) == ["began making", "closed making"]
