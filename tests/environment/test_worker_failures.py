"""Environments that misbehave: each gets its sentence and its kind, is closed once, and leaves nothing behind."""

import asyncio
import functools
import os
import re
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from app.environment.pool import EnvironmentPool, EnvironmentSpec
from app.environment.wire import Answer, End, SampleRequest
from app.worker.remote import Job
from app.worker.wire import Failed
from tests.environment.characters import tokens
from tests.environment.pools import PATIENCE_S, Maker, a_task, play, play_one, running_pool, script
from tests.waiting import alive, until

ENV = """
import os, signal, subprocess, sys, threading, time, re, asyncio
class Env:
    def __init__(self, closed=None):
        self.closed = closed
    def begin(self, task):
        self.row = task.row
        return self.act("begin")
    def step(self, reply):
        return self.act("step")
    def score(self):
        return self.act("score")
    def close(self):
        with open(self.closed, "a") as file:
            print(self.row["do"], self.row.get("at"), file=file)
        self.act("close")
    def act(self, at):
        if self.row.get("at") == at:
            return eval(self.row["do"])
        return 1.0 if at == "score" else None
    def fail(self):
        raise KeyError("lost\\nkey")
def write_to_sockets(text):
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and "socket" in os.path.realpath(f"/proc/self/fd/{fd}"):
            os.write(fd, text)
    time.sleep(1e6)
class Unmade(Env):
    def __init__(self, closed): raise OSError("no disk")
class Slow(Env):
    async def begin(self, task): self.row = task.row; return await self.later("begin")
    async def step(self, reply): return await self.later("step")
    async def score(self): return await self.later("score")
    async def close(self):
        with open(self.closed, "a") as file:
            print(self.row["do"], self.row.get("at"), file=file)
        await self.later("close")
    async def later(self, at):
        result = self.act(at)
        return await result if asyncio.iscoroutine(result) else result
    async def fail(self): raise KeyError("lost\\nkey")
"""
Env = Callable[..., EnvironmentSpec]
Outcome = tuple[list[Any], dict[str, int], list[str]]  # ends, each a `Failed` or `End`; counts; what was closed
Misbehave = Callable[..., Awaitable[Outcome]]
FOREVER = "threading.Event().wait()"


@pytest.fixture
def env(own: Maker, tmp_path: Path) -> Env:
    """Makes the spec of environments whose tasks say what they do, and at which step."""
    return functools.partial(own, ENV, args={"closed": str(tmp_path / "closed")})


@pytest.fixture
def misbehave(env: Env, tmp_path: Path) -> Misbehave:
    """Play episodes that do something at some step, in one worker; returns how each ended, and the counts."""

    async def run(*acts: tuple[str, str], log: Path | None = None, **settings: Any) -> Outcome:
        async with running_pool(env(**settings), log=log) as pool:
            ends = [(await play_one(pool, "a", task=a_task(row={"at": at, "do": do}))).end for at, do in acts]
            counts = pool.counts
        closed = tmp_path / "closed"
        return ends, counts, closed.read_text().splitlines() if closed.exists() else []

    return run


async def waiting_for_an_engine(pool: EnvironmentPool) -> tuple[Job, SampleRequest]:
    """An episode that has asked for its first reply."""
    session = await pool.begin(a_task(row={"do": "1"}), tokens("a"))
    ask = await asyncio.wait_for(session.next(), PATIENCE_S)
    assert isinstance(ask, SampleRequest)
    return session, ask


@pytest.mark.parametrize("name", ["Env", "Slow"])
async def test_what_an_environment_raises_fails_its_episode_says_where_and_is_in_the_log(
    misbehave: Misbehave, name: str, tmp_path: Path
) -> None:
    steps = ["begin", "step", "score", "close"]
    log = tmp_path / "logs" / "environment.log"
    silent = ("step", "setattr(sys, 'stderr', None) or self.fail()")
    acts = [*((at, "self.fail()") for at in steps), silent, ("never", "1")]
    ends, counts, closed = await misbehave(*acts, name=name, log=log)
    for at, end in zip([*steps, "step"], ends, strict=False):
        assert isinstance(end, Failed), at
        assert end.kind == "raised"
        assert re.fullmatch(rf"{at} raised KeyError: 'lost\\nkey' at .*environment_of_a_test_\w+\.py:\d+", end.text)
        assert not end.stuck
    assert isinstance(ends[-1], End)
    assert counts == {"raised": 5, "restarts": 0}
    assert closed == [*[f"self.fail() {at}" for at in steps], f"{silent[1]} step", "1 never"]
    assert "of set/0@0: step raised\nTraceback (most recent call last)" in log.read_text()


@pytest.mark.parametrize("name", ["Env", "Slow"])
async def test_an_exit_in_an_environment_ends_its_episode_and_not_the_worker(misbehave: Misbehave, name: str) -> None:
    acts = [("begin", "sys.exit(3)"), ("score", "(_ for _ in ()).throw(KeyboardInterrupt)")]
    raised = ["begin raised SystemExit: 3", "score raised KeyboardInterrupt"]
    if name == "Env":  # a coroutine cannot raise it
        acts.append(("step", "next(iter(()))"))
        raised.append("step raised StopIteration")
    ends, counts, closed = await misbehave(*acts, ("never", "1"), name=name)
    assert [end.text.split(" at ")[0] for end in ends[:-1]] == raised
    assert all(re.search(r" at .*environment_of_a_test_\w+\.py:\d+$|<string>:1$", end.text) for end in ends[:-1])
    assert isinstance(ends[-1], End)
    assert counts == {"raised": len(acts), "restarts": 0}
    assert len(closed) == len(acts) + 1


async def test_a_wrong_value_fails_its_episode(misbehave: Misbehave) -> None:
    ends, counts, closed = await misbehave(("begin", "{1}"), ("step", "7"), ("score", "'0.5'"))
    assert [end.text.partition(";")[0] for end in ends] == [
        "begin returned a set ({1})",
        "step returned an int (7)",
        "the score is a str ('0.5')",
    ]
    assert counts == {"value": 3, "restarts": 0}
    assert len(closed) == 3


async def test_a_constructor_that_raises_fails_the_episode_and_there_is_nothing_to_close(misbehave: Misbehave) -> None:
    (end,), counts, closed = await misbehave(("never", "1"), name="Unmade")
    assert end.text.startswith("the constructor raised OSError: no disk at ")
    assert (counts, closed) == ({"raised": 1, "restarts": 0}, [])


@pytest.mark.parametrize(("name", "hang", "stuck"), [("Env", FOREVER, True), ("Slow", "asyncio.sleep(1e6)", False)])
async def test_a_step_that_hangs_fails_its_episode_and_its_worker_is_replaced_if_it_cannot_be_cancelled(
    misbehave: Misbehave, name: str, hang: str, stuck: bool
) -> None:
    ends, counts, closed = await misbehave(("step", hang), ("close", hang), ("never", "1"), name=name, timeout_s=0.3)
    late = [f"{at} took longer than 0.3 s, see environment.timeout_s" for at in ("step", "close")]
    assert ends[:2] == [Failed(number, "late", text, stuck=stuck) for number, text in enumerate(late)]
    assert isinstance(ends[2], End)
    assert counts == {"late": 2, "restarts": 2 if stuck else 0}
    assert closed == [f"{hang} step", f"{hang} close", "1 never"]


async def test_neighbors_of_a_step_that_hangs_go_on_and_their_worker_is_replaced_when_they_have_ended(env: Env) -> None:
    async with running_pool(env(timeout_s=0.5)) as pool:
        (first,) = pool.pids
        neighbor, ask = await waiting_for_an_engine(pool)
        failed = (await play_one(pool, task=a_task(row={"do": FOREVER, "at": "begin"}))).failed
        waiting = asyncio.ensure_future(pool.begin(a_task(row={"do": "1"}), tokens("b")))
        await asyncio.sleep(0.2)
        assert not waiting.done()  # the worker takes no new episodes
        assert pool.pids == [first]

        neighbor.reply(ask, Answer(ask.number, tokens("x"), "stop"))
        assert isinstance((await play(neighbor, script())).end, End)
        assert isinstance((await play(await asyncio.wait_for(waiting, PATIENCE_S), script("y"))).end, End)
        assert pool.pids != [first]
        assert (failed.kind, pool.counts) == ("late", {"late": 1, "restarts": 1})


async def failed_beside_a_neighbor(pool: EnvironmentPool, do: str) -> tuple[Failed, Failed]:
    """How an episode that does this ended, and one that waited for an engine meanwhile; then another is played."""
    neighbor, _ = await waiting_for_an_engine(pool)
    failed = (await play_one(pool, task=a_task(row={"do": do, "at": "begin"}))).failed
    lost = (await play(neighbor, script())).failed
    assert isinstance((await play_one(pool, "a", task=a_task(row={"do": "1"}))).end, End)
    return failed, lost


@pytest.mark.parametrize(
    ("do", "status"), [("os._exit(3)", "exit code 3"), ("os.closerange(3, 100) or time.sleep(1e6)", "signal 9")]
)
async def test_an_environment_that_ends_the_worker_fails_and_those_that_wait_for_an_engine_are_lost(
    env: Env, tmp_path: Path, do: str, status: str
) -> None:
    log = tmp_path / "environment.log"
    warnings: list[str] = []
    async with running_pool(env(), log=log, warn=warnings.append) as pool:
        died, lost = await failed_beside_a_neighbor(pool, do)
        counts = pool.counts
    sentence = f"the worker process died ({status}); log: {log}"
    assert (died.kind, died.text) == ("died", sentence)
    assert (lost.kind, lost.text) == ("lost", f"the worker ended while this job waited for an answer: {sentence}")
    assert counts == {"died": 1, "lost": 1, "restarts": 1}
    assert warnings == [f"A worker of the environment is replaced: {sentence}."]


async def test_an_environment_that_holds_the_gil_is_killed_and_its_neighbors_are_lost(
    env: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.worker.remote.SILENCE_TIMEOUT_S", 2.0)
    async with running_pool(env(timeout_s=0.5)) as pool:
        held, lost = await failed_beside_a_neighbor(pool, "re.match('(a+)+$', 'a' * 60 + 'b')")
        counts = pool.counts
    assert (held.kind, lost.kind) == ("late", "lost")
    assert "blocks its event loop or holds the GIL" in held.text
    assert counts == {"late": 1, "lost": 1, "restarts": 1}


async def test_a_worker_whose_tools_never_end_is_replaced_after_their_episode(own: Maker) -> None:
    source = """
import time

from app.environment.tools import ToolLoop

class Env(ToolLoop):
    def __init__(self):
        super().__init__({}, 0.1)

    async def run(self, task, policy):
        try:
            await self._call("sleep", lambda: time.sleep(1000))
        except Exception:
            return 1.0
"""
    async with running_pool(own(source)) as pool:
        assert (await play_one(pool)).scored.scores == {"score": 1.0}
        assert (await play_one(pool)).scored.scores == {"score": 1.0}
        assert pool.restarts >= 1


async def test_an_environment_that_eats_memory_fails_and_the_worker_goes_on(misbehave: Misbehave) -> None:
    ends, counts, _ = await misbehave(("step", "bytearray(3 << 30)"), ("never", "1"), memory_gib=1.0)
    assert ends[0].kind == "memory"
    assert ends[0].text.startswith("step raised MemoryError at ")
    assert isinstance(ends[1], End)
    assert counts == {"memory": 1, "restarts": 0}


async def test_an_environment_that_writes_to_the_pipe_ends_its_worker(misbehave: Misbehave) -> None:
    def write(text: bytes) -> str:
        return f"write_to_sockets({text!r})"

    junk = [b"junk\n", b'{"unknown": 1}\n', b'{"ready": 1, "more": 2}\n']
    ends, counts, _ = await misbehave(*[("step", write(each)) for each in junk], ("never", "1"))
    for line, end in zip(junk, ends, strict=False):
        assert end.kind == "died"
        assert f"it wrote to the worker's pipe: not a message of ours: {line[:-1]!r}" in end.text
    assert isinstance(ends[-1], End)
    assert counts == {"died": 3, "restarts": 3}


async def test_children_of_an_environment_are_gone_with_their_worker_and_cannot_write_to_its_pipe(
    env: Env, tmp_path: Path
) -> None:
    pid = tmp_path / "pid"
    start = f"open({str(pid)!r}, 'w').write(str(subprocess.Popen(['sleep', '1000']).pid)) and "
    fork = "write_to_sockets(b'junk\\n') if os.fork() == 0 else time.sleep(0.5)"

    async with running_pool(env()) as pool:
        died = (await play_one(pool, task=a_task(row={"do": start + "os._exit(3)", "at": "begin"}))).failed
        await asyncio.to_thread(until, lambda: not alive(int(pid.read_text())), PATIENCE_S)
        forked = (await play_one(pool, "a", task=a_task(row={"do": fork, "at": "begin"}))).end
        started = (await play_one(pool, "a", task=a_task(row={"do": start + "None", "at": "begin"}))).end
        kind, restarts = died.kind, pool.restarts
        assert alive(int(pid.read_text()))
    await asyncio.to_thread(until, lambda: not alive(int(pid.read_text())), PATIENCE_S)
    assert (kind, restarts) == ("died", 1)
    assert isinstance(forked, End)
    assert isinstance(started, End)


async def test_a_worker_that_dies_with_a_child_at_its_pipe_is_noticed(env: Env) -> None:
    # a child of a C library runs no hooks of Python, so it keeps the worker's pipe
    die = "__import__('ctypes').CDLL(None).fork() and os._exit(5) or time.sleep(1e6)"

    async with running_pool(env()) as pool:
        end = (await play_one(pool, task=a_task(row={"do": die, "at": "begin"}))).failed
    assert (end.kind, end.text) == ("died", "the worker process died (exit code 5)")


async def test_a_signal_leaves_the_worker_to_the_driver_and_ends_what_an_environment_started(own: Maker) -> None:
    spec = own(
        """
        import os, subprocess
        class Env:
            def begin(self, task):
                self.child = subprocess.Popen(["sleep", "1000"])
                self.child.send_signal(task.row["signal"])
                self.child.wait()
            def step(self, reply): ...
        """
    )

    async with running_pool(spec) as pool:
        (worker,) = pool.pids
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(worker, number)
            await play_one(pool, "a", task=a_task(row={"signal": int(number)}))
        assert pool.pids == [worker]


async def test_task_data_arrives_as_it_is(own: Maker) -> None:
    spec = own("class Env:\n    def begin(self, task): return repr(task)\n    def step(self, reply): ...")

    async with running_pool(spec) as pool:
        played = await play_one(pool, "a", task=a_task(row={"text": "\ud800é\n", "n": 1.5, "none": None}))
    assert played.texts[0][1].startswith(
        "Task(id='set/0@0', question='6*7=', answer='42', source='set', row={'text': '\\ud800é"
    )


async def test_an_environment_that_drives_itself_fails_like_any_other(own: Maker) -> None:
    spec = own(
        """
        import asyncio, sys
        class Env:
            async def run(self, task, policy):
                if task.row["do"] == "exit": sys.exit(3)
                if task.row["do"] == "cancel": asyncio.current_task().cancel()
                if task.row["do"] == "hang": await asyncio.sleep(1e6)
                await policy(None)
                return set()
        """,
        timeout_s=0.3,
    )

    async with running_pool(spec) as pool:
        acts = ["exit", "cancel", "hang", "value"]
        ends = [(await play_one(pool, "a", task=a_task(row={"do": do}))).failed for do in acts]
        counts = pool.counts
    assert [(end.kind, end.text.split(" at /")[0]) for end in ends] == [
        ("raised", "run raised SystemExit: 3"),
        ("raised", "run raised CancelledError"),
        ("late", "run took longer than 0.3 s, see environment.timeout_s"),
        ("value", "the score is a set (set()); give a number, numbers by name, or None"),
    ]
    assert counts == {"raised": 2, "late": 1, "value": 1, "restarts": 0}
