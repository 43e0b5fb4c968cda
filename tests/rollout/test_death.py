"""A server that hangs, dies, or loses its host; keys. The tests share one real server and run in order."""

import asyncio
import os
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import ray

from app.errors import EngineError, EngineLost
from app.rollout.remote import RemoteEngine
from app.types import FinishReason
from tests.rollout.support import (
    HOT,
    KEY,
    host_spec,
    in_flight,
    process_group,
    remote,
    request,
    server_spec,
    without_end,
)
from tests.waiting import until


@dataclass(frozen=True)
class OwnServer:
    """A server that its host started."""

    engine: RemoteEngine
    url: str
    pid: int
    log: Path


@pytest.fixture(scope="module")
def own(ray_session: None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnServer]:
    """Completions end at their token limit, and 4 are sampled at a time; the last test of this module kills it."""
    folder = tmp_path_factory.mktemp("own")
    model = without_end(tiny_model, folder)
    server = server_spec(model, folder, name="engine 5", max_running_requests=4)
    engine = remote(host_spec(folder, name="engine 5", server=server))
    info = asyncio.run(engine.start(300))
    yield OwnServer(engine, info["url"], info["pid"], server.log)
    asyncio.run(engine.stop())
    ray.kill(engine.actor)


@pytest.fixture(scope="module")
def visitor(own: OwnServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteEngine]:
    """A host for the same server, as `rollout.urls` makes one: it starts no process."""
    folder = tmp_path_factory.mktemp("visitor")
    engine = remote(host_spec(folder, name="engine 6", url=own.url, key=KEY, stall_timeout_s=3))
    info = asyncio.run(engine.start(60))
    assert (info["url"], info["pid"]) == (own.url, None)
    assert info["version"]
    yield engine
    asyncio.run(engine.stop())
    ray.kill(engine.actor)


def test_a_server_answers_only_with_its_key(own: OwnServer) -> None:
    for headers in ({}, {"Authorization": "Bearer another"}):
        call = urllib.request.Request(own.url + "/server_info", headers=headers)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(call, timeout=10)
        assert refused.value.code == 401


def test_no_process_list_and_no_log_shows_the_key(own: OwnServer) -> None:
    processes = process_group(own.pid)
    assert len(processes) >= 4  # the server, its watcher, its scheduler, its detokenizer
    assert not [process for process in processes if KEY in " ".join(process.cmdline())]
    assert KEY not in own.log.read_text()


async def test_a_running_server_is_used_by_its_address(own: OwnServer, visitor: RemoteEngine) -> None:
    """At the same time as by another host, for the same prompt."""

    theirs = await in_flight(own.engine, request(group_size=2, temperature=HOT, max_tokens=2000))
    assert len(await visitor.generate(request(group_size=2))) == 2
    assert not theirs.done()
    await visitor.abort(["test/0@0"])
    assert {completion.finish_reason for completion in await theirs} == {FinishReason.length}


def test_a_wrong_key_is_one_sentence(own: OwnServer, tmp_path: Path) -> None:
    engine = remote(host_spec(tmp_path, name="engine 9", url=own.url, key="another"))
    with pytest.raises(EngineError) as refused:
        asyncio.run(engine.start(60))
    ray.kill(engine.actor)
    assert str(refused.value) == f"engine 9 at {own.url} refused our key (HTTP 401)"


async def test_aborted_members_that_were_still_waiting_are_empty(own: OwnServer) -> None:
    task = await in_flight(own.engine, request(group_size=64, temperature=HOT, max_tokens=3000), running=4)
    await own.engine.abort(["test/0@0"])
    completions = await asyncio.wait_for(task, 60)
    assert {completion.finish_reason for completion in completions} == {FinishReason.abort}
    assert all(len(each.token_ids) == len(each.logprobs) == each.spans[-1].end for each in completions)
    tokens = [each.token_ids.tolist() for each in completions]
    assert sum(bool(each) for each in tokens) >= 4
    assert sum(not each for each in tokens) >= 4


@pytest.mark.slow  # takes 10 s; the recovery soaks cover it twenty times
async def test_a_scheduler_that_stands_still_is_found_while_nothing_is_in_flight(
    own: OwnServer, tmp_path: Path
) -> None:
    """Its HTTP process still answers `/health`."""
    engine = remote(host_spec(tmp_path, name="engine 10", url=own.url, key=KEY))
    (scheduler,) = [each for each in process_group(own.pid) if "sglang::scheduler" in " ".join(each.cmdline())]

    await engine.start(60)
    await engine.check()
    scheduler.suspend()
    try:
        with pytest.raises(EngineLost) as lost:
            await asyncio.wait_for(engine.check(), 20)
    finally:
        scheduler.resume()
    with pytest.raises(EngineLost):
        await engine.check()  # it stays lost
    result = lost.value
    assert re.search("engine 10 .*/server_info within 10 s", str(result))
    ray.kill(engine.actor)


async def test_a_server_that_stalls_fails_what_is_in_flight(own: OwnServer, visitor: RemoteEngine) -> None:
    task = await in_flight(visitor, request(group_size=4, temperature=HOT, max_tokens=2000))
    os.killpg(own.pid, signal.SIGSTOP)
    try:
        with pytest.raises(EngineError) as stalled:
            await asyncio.wait_for(task, 20)
    finally:
        os.killpg(own.pid, signal.SIGCONT)
    result = stalled.value
    assert re.search(r"engine 6 .*rollout.stall_timeout_s=3 s .*\(test/0@0\)", str(result))


def test_a_killed_server_fails_what_is_in_flight_within_5_seconds(own: OwnServer) -> None:
    async def run() -> tuple[EngineError, EngineError, float]:
        task = await in_flight(own.engine, request(group_size=4, temperature=HOT, max_tokens=2000))
        os.kill(own.pid, signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(EngineError) as pending:
            await asyncio.wait_for(task, 10)
        seconds = time.monotonic() - killed
        with pytest.raises(EngineError) as later:
            await own.engine.generate(request())
        return pending.value, later.value, seconds

    pending, later, seconds = asyncio.run(run())
    assert seconds < 5
    head, *tail = str(pending).splitlines()
    assert re.search(rf"engine 5 \(pid {own.pid}\) .*SIGKILL; log: {own.log}", head)
    assert tail
    assert [line.removeprefix("  | ") for line in tail] == own.log.read_text().splitlines()[-len(tail) :]
    assert str(later) == str(pending)
    assert until(lambda: not process_group(own.pid), 5) < 5


@pytest.mark.slow
def test_a_server_that_dies_at_its_start_shows_the_end_of_its_log(
    ray_session: None, tiny_model: Path, tmp_path: Path
) -> None:
    server = server_spec(tiny_model, tmp_path, name="engine 7", no_such_flag=1)
    engine = remote(host_spec(tmp_path, name="engine 7", server=server))
    with pytest.raises(EngineError) as died:
        asyncio.run(engine.start(120))
    asyncio.run(engine.stop())
    message = str(died.value)
    assert message.startswith("engine 7 (pid ")
    assert f"code 2; log: {server.log}" in message
    assert "unrecognized arguments: --no-such-flag 1" in message


def writes_to(pid: int, log: Path) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/fd/1") == str(log)
    except OSError:  # it ended, or belongs to another user
        return False


@pytest.mark.slow
def test_a_server_ends_with_its_host(ray_session: None, tiny_model: Path, tmp_path: Path) -> None:
    """Killed while it starts, when its children do not watch it yet."""
    server = server_spec(tiny_model, tmp_path, name="engine 8")
    engine = remote(host_spec(tmp_path, name="engine 8", server=server))
    started = engine.actor.start.remote()

    def leader() -> psutil.Process | None:
        return next(
            (p for p in psutil.process_iter() if writes_to(p.pid, server.log) and os.getpgid(p.pid) == p.pid), None
        )

    until(lambda: (server := leader()) is not None and len(process_group(server.pid)) >= 4, 120)
    server_process = leader()
    assert server_process is not None
    ray.kill(engine.actor)
    assert until(lambda: not process_group(server_process.pid), 5) < 5
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(started, timeout=10)
