"""Environments that misbehave: each gets its sentence and its kind, is closed once, and leaves nothing behind."""

import asyncio
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.environment.wire import End, SampleRequest
from app.worker.wire import Failed
from tests.environment.characters import tokens
from tests.environment.pools import PATIENCE_S, Maker, a_task, play, play_one, running_pool, script
from tests.waiting import until

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
Misbehave = Callable[..., tuple[list[Any], dict[str, int], list[str]]]  # each end a `Failed` or `End`
FOREVER = "threading.Event().wait()"


@pytest.fixture
def misbehave(own: Maker, tmp_path: Path) -> Misbehave:
    """Play episodes that do something at some step, in one worker; returns how each ended, and the counts."""

    def run(
        *acts: tuple[str, str], name: str = "Env", log: Path | None = None, **limits: Any
    ) -> tuple[list[End | Failed], dict[str, int], list[str]]:
        closed = tmp_path / "closed"
        spec = own(ENV, name=name, args={"closed": str(closed)}, **limits)

        async def play_all() -> tuple[list[End | Failed], dict[str, int]]:
            async with running_pool(spec, log=log) as pool:
                ends = []
                for at, do in acts:
                    played = await play_one(pool, "a", task=a_task(row={"at": at, "do": do}))
                    ends.append(played.end)
                return ends, pool.counts

        ends, counts = asyncio.run(play_all())
        lines = closed.read_text().splitlines() if closed.exists() else []
        return ends, counts, lines

    return run


@pytest.mark.parametrize("name", ["Env", "Slow"])
def test_what_an_environment_raises_fails_its_episode_and_says_where(misbehave: Misbehave, name: str) -> None:
    steps = ["begin", "step", "score", "close"]
    ends, counts, closed = misbehave(*[(at, "self.fail()") for at in steps], ("never", "1"), name=name)
    for at, end in zip(steps, ends, strict=False):
        assert isinstance(end, Failed), at
        assert end.kind == "raised"
        assert re.fullmatch(rf"{at} raised KeyError: 'lost\\nkey' at .*environment_of_a_test_\w+\.py:\d+", end.text)
        assert not end.stuck
    assert isinstance(ends[-1], End)
    assert counts == {"raised": 4, "restarts": 0}
    assert closed == [f"self.fail() {at}" for at in steps] + ["1 never"]


def test_the_traceback_of_what_an_environment_raises_is_in_the_log(misbehave: Misbehave, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "environment.log"
    misbehave(("step", "self.fail()"), log=log)
    text = log.read_text()
    assert "of set/0@0: step raised\nTraceback (most recent call last)" in text
    assert "KeyError: 'lost\\nkey'" in text


def test_an_exit_in_an_environment_ends_its_episode_and_not_the_worker(misbehave: Misbehave) -> None:
    acts = [("begin", "sys.exit(3)"), ("step", "next(iter(()))"), ("score", "(_ for _ in ()).throw(KeyboardInterrupt)")]
    ends, counts, closed = misbehave(*acts)
    assert [end.kind for end in ends] == ["raised"] * 3
    raised = ["begin raised SystemExit: 3", "step raised StopIteration", "score raised KeyboardInterrupt"]
    assert [end.text.split(" at ")[0] for end in ends] == raised
    assert all(re.search(r" at .*environment_of_a_test_\w+\.py:\d+$|<string>:1$", end.text) for end in ends)
    assert counts == {"raised": 3, "restarts": 0}
    assert len(closed) == 3


def test_an_exit_in_an_async_environment_ends_its_episode_and_not_the_worker(misbehave: Misbehave) -> None:
    ends, counts, closed = misbehave(("begin", "sys.exit(3)"), ("never", "1"), name="Slow")
    assert ends[0].text.startswith("begin raised SystemExit: 3 at ")
    assert isinstance(ends[1], End)
    assert counts == {"raised": 1, "restarts": 0}
    assert len(closed) == 2


def test_a_wrong_value_says_what_it_is_and_what_is_accepted(misbehave: Misbehave) -> None:
    acts = [
        ("begin", "{1}"),
        ("step", "7"),
        ("step", "[{'role': 'user'}]"),
        ("score", "{1}"),
        ("score", "float('nan')"),
        ("score", "{'a': 1, 'b': float('inf')}"),
        ("score", "{'a': 'x'}"),
        ("score", "'0.5'"),
    ]
    ends, counts, closed = misbehave(*acts)
    assert [(end.kind, end.text) for end in ends] == [
        ("value", "begin returned a set ({1}); give a str, a list of messages with role and content, or None"),
        ("value", "step returned an int (7); give a str, a list of messages with role and content, or None"),
        (
            "value",
            "step returned a list ([{'role': 'user'}]); give a str, a list of messages with role and content, or None",
        ),
        ("value", "the score is a set ({1}); give a number, numbers by name, or None"),
        ("value", "the score is nan; give a finite number"),
        ("value", "the score b is inf; give a finite number"),
        ("value", "the score a is a str ('x'); give a number, numbers by name, or None"),
        ("value", "the score is a str ('0.5'); give a number, numbers by name, or None"),
    ]
    assert counts == {"value": 8, "restarts": 0}
    assert len(closed) == 8


async def test_a_constructor_that_raises_fails_the_episode_and_there_is_nothing_to_close(own: Maker) -> None:
    spec = own(
        """
        class Env:
            def __init__(self): raise OSError('no disk')
            def begin(self, task): ...
            def step(self, reply): ...
        """
    )

    async with running_pool(spec) as pool:
        end = (await play_one(pool)).failed
    assert end.kind == "raised"
    assert end.text.startswith("the constructor raised OSError: no disk at ")


def test_an_async_step_that_hangs_is_cancelled_and_the_worker_goes_on(misbehave: Misbehave) -> None:
    acts = [("step", "asyncio.sleep(1e6)"), ("close", "asyncio.sleep(1e6)"), ("never", "1")]
    ends, counts, closed = misbehave(*acts, name="Slow", timeout_s=0.5)
    assert [(end.kind, end.text, end.stuck) for end in ends[:2]] == [
        ("late", "step took longer than 0.5 s, see environment.timeout_s", False),
        ("late", "close took longer than 0.5 s, see environment.timeout_s", False),
    ]
    assert isinstance(ends[2], End)
    assert counts == {"late": 2, "restarts": 0}
    assert len(closed) == 3


@pytest.mark.parametrize("at", ["begin", "step", "score", "close"])
def test_a_step_that_hangs_fails_its_episode_and_its_worker_is_replaced(misbehave: Misbehave, at: str) -> None:
    ends, counts, closed = misbehave((at, FOREVER), ("never", "1"), timeout_s=0.5)
    assert ends[0] == Failed(0, "late", f"{at} took longer than 0.5 s, see environment.timeout_s", stuck=True)
    assert isinstance(ends[1], End)
    assert counts == {"late": 1, "restarts": 1}
    assert closed == [f"{FOREVER} {at}", "1 never"]


def test_neighbors_of_a_step_that_hangs_go_on_and_their_worker_is_replaced_when_they_have_ended(
    own: Maker, tmp_path: Path
) -> None:
    spec = own(ENV, args={"closed": str(tmp_path / "closed")}, timeout_s=0.5)

    async def run() -> tuple[Failed, End | Failed, End | Failed, dict[str, int]]:
        async with running_pool(spec) as pool:
            (first,) = pool.pids
            neighbor = await pool.begin(a_task(row={"do": "1"}), tokens("a"))
            ask = await asyncio.wait_for(neighbor.next(), PATIENCE_S)
            assert isinstance(ask, SampleRequest)

            failed = await play_one(pool, task=a_task(row={"do": FOREVER, "at": "begin"}))
            waiting = asyncio.ensure_future(pool.begin(a_task(row={"do": "1"}), tokens("b")))
            await asyncio.sleep(0.2)
            assert not waiting.done()  # the worker takes no new episodes
            assert pool.pids == [first]

            neighbor.answer(ask, tokens("x"), "stop")
            ended = await play(neighbor, script())
            later = await play(await asyncio.wait_for(waiting, PATIENCE_S), script("y"))
            assert pool.pids != [first]
            return failed.failed, ended.end, later.end, pool.counts

    failed, ended, later, counts = asyncio.run(run())
    assert failed.kind == "late"
    assert isinstance(ended, End)
    assert isinstance(later, End)
    assert counts == {"late": 1, "restarts": 1}


@pytest.mark.parametrize(
    ("do", "status"),
    [
        ("os._exit(3)", "exit code 3"),
        ("os.kill(os.getpid(), 9)", "signal 9"),
        ("os.abort()", "signal 6"),
        ("os.closerange(3, 100) or time.sleep(1e6)", "signal 9"),
    ],
)
def test_an_environment_that_ends_the_worker_fails_and_those_that_wait_for_an_engine_are_lost(
    own: Maker, tmp_path: Path, do: str, status: str
) -> None:
    spec = own(ENV, args={"closed": str(tmp_path / "closed")})
    log = tmp_path / "environment.log"
    warnings: list[str] = []

    async def run() -> tuple[Failed, Failed, End | Failed, dict[str, int]]:
        async with running_pool(spec, log=log, warn=warnings.append) as pool:
            neighbor = await pool.begin(a_task(row={"do": "1"}), tokens("a"))
            assert isinstance(await asyncio.wait_for(neighbor.next(), PATIENCE_S), SampleRequest)
            died = await play_one(pool, task=a_task(row={"do": do, "at": "begin"}))
            lost = await play(neighbor, script())
            after = await play_one(pool, "a", task=a_task(row={"do": "1"}))
            return died.failed, lost.failed, after.end, pool.counts

    died, lost, after, counts = asyncio.run(run())
    sentence = f"the worker process died ({status}); log: {log}"
    assert (died.kind, died.text) == ("died", sentence)
    assert (lost.kind, lost.text) == ("lost", f"the worker ended while this job waited for an answer: {sentence}")
    assert isinstance(after, End)
    assert counts == {"died": 1, "lost": 1, "restarts": 1}
    assert warnings == [f"A worker of the environment is replaced: {sentence}."]


async def test_a_worker_that_is_killed_while_all_its_episodes_wait_for_an_engine_blames_none(
    own: Maker, tmp_path: Path
) -> None:
    spec = own(ENV, args={"closed": str(tmp_path / "closed")})

    async with running_pool(spec) as pool:
        sessions = [await pool.begin(a_task(row={"do": "1"}), tokens("a")) for _ in range(3)]
        for session in sessions:
            assert isinstance(await asyncio.wait_for(session.next(), PATIENCE_S), SampleRequest)
        os.kill(pool.pids[0], signal.SIGKILL)
        result = [(await play(session, script())).failed.kind for session in sessions]
    assert result == ["lost"] * 3


def test_an_environment_that_holds_the_gil_is_killed_and_its_neighbors_are_lost(
    own: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.worker.remote.SILENCE_TIMEOUT_S", 2.0)
    spec = own(ENV, args={"closed": str(tmp_path / "closed")}, timeout_s=1.0)
    backtrack = "re.match('(a+)+$', 'a' * 60 + 'b')"

    async def run() -> tuple[Failed, Failed, End | Failed, dict[str, int]]:
        async with running_pool(spec) as pool:
            neighbor = await pool.begin(a_task(row={"do": "1"}), tokens("a"))
            assert isinstance(await asyncio.wait_for(neighbor.next(), PATIENCE_S), SampleRequest)
            held = await play_one(pool, task=a_task(row={"do": backtrack, "at": "begin"}))
            lost = await play(neighbor, script())
            after = await play_one(pool, "a", task=a_task(row={"do": "1"}))
            return held.failed, lost.failed, after.end, pool.counts

    held, lost, after, counts = asyncio.run(run())
    assert held.kind == "late"
    assert re.fullmatch(
        r"the worker was silent for \d+ s: the environment blocks its event loop or holds the GIL", held.text
    )
    assert lost.kind == "lost"
    assert isinstance(after, End)
    assert counts == {"late": 1, "lost": 1, "restarts": 1}


def test_an_environment_that_eats_memory_fails_and_the_worker_goes_on(misbehave: Misbehave) -> None:
    ends, counts, _ = misbehave(("step", "bytearray(3 << 30)"), ("never", "1"), memory_gib=1.0)
    assert ends[0].kind == "memory"
    assert ends[0].text.startswith("step raised MemoryError at ")
    assert isinstance(ends[1], End)
    assert counts == {"memory": 1, "restarts": 0}


def test_what_an_environment_prints_goes_to_the_log(misbehave: Misbehave, tmp_path: Path) -> None:
    log = tmp_path / "environment.log"
    speak = "print('to stdout') or sys.stderr.write('to stderr') and os.write(1, b'to descriptor 1') and None"
    ends, counts, _ = misbehave(("step", speak), log=log)
    assert isinstance(ends[0], End)
    assert all(text in log.read_text() for text in ("to stdout", "to stderr", "to descriptor 1"))
    assert counts == {"restarts": 0}


def test_an_environment_that_writes_to_the_pipe_ends_its_worker(misbehave: Misbehave) -> None:
    def write(text: bytes) -> str:
        return f"write_to_sockets({text!r})"

    junk = [b"junk\n", b'{"unknown": 1}\n', b'{"end": 0}\n', b"[]\n", b'{"ready": 1, "more": 2}\n', b"\xff\n"]
    ends, counts, _ = misbehave(*[("step", write(each)) for each in junk], ("never", "1"))
    for line, end in zip(junk, ends, strict=False):
        assert end.kind == "died"
        assert f"it wrote to the worker's pipe: not a message of ours: {line[:-1]!r}" in end.text
    assert isinstance(ends[-1], End)
    assert counts == {"died": 6, "restarts": 6}


def test_a_child_that_an_environment_forks_is_gone_with_the_worker(own: Maker, tmp_path: Path) -> None:
    spec = own(ENV, args={"closed": str(tmp_path / "closed")})
    fork = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(pid)) and None if (pid := os.fork()) else time.sleep(1e6)"
    run = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(subprocess.Popen(['sleep', '1000']).pid)) and None"

    async def children(do: str) -> bool:
        async with running_pool(spec) as pool:
            end = (await play_one(pool, "a", task=a_task(row={"do": do, "at": "begin"}))).end
            assert isinstance(end, End)
            child = psutil.Process(int((tmp_path / "pid").read_text()))
            assert child.is_running()
        psutil.wait_procs([child], PATIENCE_S)
        return child.is_running() and child.status() != psutil.STATUS_ZOMBIE

    assert not asyncio.run(children(fork))
    assert not asyncio.run(children(run))


async def test_a_child_of_a_worker_that_died_is_gone_and_one_that_was_forked_cannot_write_to_the_pipe(
    own: Maker, tmp_path: Path
) -> None:
    spec = own(ENV, args={"closed": str(tmp_path / "closed")})
    pid = str(tmp_path / "pid")
    start = f"open({pid!r}, 'w').write(str(subprocess.Popen(['sleep', '1000']).pid)) and os._exit(3)"
    fork = "write_to_sockets(b'junk\\n') if os.fork() == 0 else time.sleep(1)"

    async with running_pool(spec) as pool:
        died = (await play_one(pool, task=a_task(row={"do": start, "at": "begin"}))).failed
        await asyncio.to_thread(until, lambda: not runs(int(Path(pid).read_text())), PATIENCE_S)
        forked = (await play_one(pool, "a", task=a_task(row={"do": fork, "at": "begin"}))).end
        kind, restarts = died.kind, pool.restarts
    assert kind == "died"
    assert isinstance(forked, End)
    assert restarts == 1


def runs(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_a_worker_that_dies_with_a_child_at_its_pipe_is_noticed(own: Maker, tmp_path: Path) -> None:
    spec = own(ENV, args={"closed": str(tmp_path / "closed")})
    # a child of a C library runs no hooks of Python, so it keeps the worker's pipe
    die = "__import__('ctypes').CDLL(None).fork() and os._exit(5) or time.sleep(1e6)"

    async with running_pool(spec) as pool:
        end = (await play_one(pool, task=a_task(row={"do": die, "at": "begin"}))).failed
    assert (end.kind, end.text) == ("died", "the worker process died (exit code 5)")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_leaves_the_worker_to_the_driver_and_ends_what_an_environment_started(
    own: Maker, number: signal.Signals
) -> None:
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
        os.kill(worker, number)
        end = (await play_one(pool, "a", task=a_task(row={"signal": int(number)}))).end
        same = pool.pids == [worker]
    assert isinstance(end, End)
    assert same


async def test_task_data_arrives_as_it_is(own: Maker) -> None:
    spec = own("class Env:\n    def begin(self, task): return repr(task)\n    def step(self, reply): ...")

    async with running_pool(spec) as pool:
        played = await play_one(pool, "a", task=a_task(row={"text": "\ud800é\n", "n": 1.5, "none": None}))
    assert isinstance(played.end, End)
    assert played.texts[0][1].startswith(
        "Task(id='set/0@0', question='6*7=', answer='42', source='set', row={'text': '\\ud800é"
    )


def test_an_environment_that_breaks_stderr_still_fails_with_its_sentence(misbehave: Misbehave) -> None:
    ends, counts, _ = misbehave(("step", "setattr(sys, 'stderr', None) or self.fail()"), ("never", "1"))
    assert ends[0].kind == "raised"
    assert isinstance(ends[1], End)
    assert counts == {"raised": 1, "restarts": 0}


def test_an_environment_that_drives_itself_fails_like_any_other(own: Maker) -> None:
    spec = own(
        """
        import asyncio, os, sys, time
        class Env:
            async def run(self, task, policy):
                if task.row["do"] == "exit": sys.exit(3)
                if task.row["do"] == "cancel": asyncio.current_task().cancel()
                if task.row["do"] == "hang": await asyncio.sleep(1e6)
                if task.row["do"] == "nothing": await policy([])
                await policy(None)
                return set()
        """,
        timeout_s=0.5,
    )

    async def run() -> tuple[list[tuple[str, str]], dict[str, int]]:
        async with running_pool(spec) as pool:
            acts = ["exit", "cancel", "hang", "nothing", "value"]
            ends = [(await play_one(pool, "a", task=a_task(row={"do": do}))).failed for do in acts]
            return [(end.kind, end.text.split(" at /")[0]) for end in ends], pool.counts

    ends, counts = asyncio.run(run())
    assert ends == [
        ("raised", "run raised SystemExit: 3"),
        ("raised", "run raised CancelledError"),
        ("late", "run took longer than 0.5 s, see environment.timeout_s"),
        (
            "raised",
            "run raised ValueError: a conversation has at least one message; None stands for the data set's prompt",
        ),
        ("value", "the score is a set (set()); give a number, numbers by name, or None"),
    ]
    assert counts == {"raised": 3, "late": 1, "value": 1, "restarts": 0}


async def test_an_environment_that_limits_itself_may_take_longer_than_a_step(own: Maker) -> None:
    spec = own(
        """
        import asyncio
        class Env:
            limits_itself = True
            async def run(self, task, policy):
                await asyncio.sleep(1.5)
                return 1
        """,
        timeout_s=0.2,
    )

    async with running_pool(spec) as pool:
        result = (await play_one(pool)).scored
    assert result.scores == {"score": 1.0}
