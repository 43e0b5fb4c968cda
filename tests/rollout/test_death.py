"""A server that hangs, dies, or loses a request or its host; keys. The tests share a real server and run in order."""

import asyncio
import os
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
import ray

from app.errors import EngineError, EngineLost
from app.rollout.engine.remote import RemoteEngine
from app.types import FinishReason, InFlight
from tests.rollout.support import (
    HOT,
    KEY,
    host_spec,
    in_flight,
    install_plugin,
    process_group,
    remote,
    request,
    server_spec,
    without_end,
)
from tests.waiting import until

STALL_S = 4.0
# An SGLang plugin: requests of the prompt lost/… never reach the queue, those of aborted/… end without being asked to.
PLUGIN = """
def load():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler._add_request_to_queue", add, HookType.AROUND)


def add(original, scheduler, req, *args, **kwargs):
    if "/aborted/" in req.rid:
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        req.to_finish = FINISH_ABORT("out of KV cache")
    if "/lost/" not in req.rid:
        original(scheduler, req, *args, **kwargs)
"""


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
    plugin = install_plugin(folder, "faulty_plugin", PLUGIN)
    server = server_spec(without_end(tiny_model, folder), folder, name="engine 5", max_running_requests=4)
    server = replace(server, environment={**server.environment, **plugin}, fork=None)
    engine = remote(host_spec(folder, name="engine 5", server=server))
    info = asyncio.run(engine.start(300))
    yield OwnServer(engine, info["url"], info["pid"], server.log)
    asyncio.run(engine.stop())
    ray.kill(engine.actor)


@pytest.fixture
def visitor(own: OwnServer, tmp_path: Path) -> Iterator[RemoteEngine]:
    """A host for the same server, as `rollout.urls` makes one: it starts no process. Once it is lost, it stays lost."""
    engine = remote(host_spec(tmp_path, name="engine 6", url=own.url, key=KEY, stall_timeout_s=STALL_S))
    info = asyncio.run(engine.start(60))
    assert (info["url"], info["pid"]) == (own.url, None)
    assert info["version"]
    yield engine
    asyncio.run(engine.stop())
    ray.kill(engine.actor)


def test_a_server_answers_only_with_its_key_which_no_process_list_and_no_log_shows(own: OwnServer) -> None:
    for headers in ({}, {"Authorization": "Bearer another"}):
        call = urllib.request.Request(own.url + "/server_info", headers=headers)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(call, timeout=10)
        assert refused.value.code == 401

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
    assert len(await visitor.generate(request(group_size=2))) == 2
    assert not theirs.done()
    await own.engine.abort(["test/0@0"])
    assert {completion.finish_reason for completion in await theirs} == {FinishReason.abort}


# --- requests that the server loses or aborts by itself, while it samples others


async def test_a_request_that_is_lost_while_others_are_sampled_loses_the_engine(visitor: RemoteEngine) -> None:
    async def sample_forever(prompt: str) -> None:
        while True:
            await visitor.generate(request(prompt, group_size=4, temperature=HOT, max_tokens=500))

    others = asyncio.gather(sample_forever("good/0@0"), sample_forever("good/1@0"))  # more than it samples at a time
    with pytest.raises(EngineLost) as lost:
        await asyncio.wait_for(visitor.generate(request("lost/1@0")), 60)
    with pytest.raises(EngineLost):
        await others  # they were sampled until then
    assert re.search(r"engine 6 .*rollout.stall_timeout_s=4 s \(lost/1@0\)", str(lost.value))


async def test_requests_of_a_paused_engine_are_not_lost(visitor: RemoteEngine) -> None:
    task = await in_flight(visitor, request(group_size=8, temperature=HOT, max_tokens=400))
    await visitor.pause(InFlight.retract)
    await asyncio.sleep(2 * STALL_S)
    assert not task.done()
    await visitor.resume()
    result = [completion.finish_reason for completion in await asyncio.wait_for(task, 120)]
    assert result == [FinishReason.length] * 8


async def test_an_abort_that_nobody_asked_for_is_an_error_of_that_prompt(visitor: RemoteEngine) -> None:
    with pytest.raises(EngineError) as aborted:
        await asyncio.wait_for(visitor.generate(request("aborted/1@0")), 60)
    assert len(await visitor.generate(request("good/2@0"))) == 4  # the engine still serves
    assert type(aborted.value) is EngineError
    assert re.search("engine 6 .* 4 of 4 .*aborted/1@0 .*: out of KV cache", str(aborted.value))


# --- processes that stop or die


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
    assert re.search("engine 10 .*/server_info within 10 s", str(lost.value))
    ray.kill(engine.actor)


async def test_a_server_that_stalls_fails_what_is_in_flight(own: OwnServer, visitor: RemoteEngine) -> None:
    task = await in_flight(visitor, request(group_size=4, temperature=HOT, max_tokens=2000))
    os.killpg(own.pid, signal.SIGSTOP)
    try:
        with pytest.raises(EngineError) as stalled:
            await asyncio.wait_for(task, 20)
    finally:
        os.killpg(own.pid, signal.SIGCONT)
    assert re.search(r"engine 6 .*rollout.stall_timeout_s=4 s .*\(test/0@0\)", str(stalled.value))


async def test_a_killed_server_fails_what_is_in_flight_within_5_seconds(own: OwnServer) -> None:
    task = await in_flight(own.engine, request(group_size=4, temperature=HOT, max_tokens=2000))
    os.kill(own.pid, signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(EngineError) as pending:
        await asyncio.wait_for(task, 10)
    assert time.monotonic() - killed < 5
    with pytest.raises(EngineError) as later:
        await own.engine.generate(request())
    head, *tail = str(pending.value).splitlines()
    assert re.search(rf"engine 5 \(pid {own.pid}\) .*SIGKILL; log: {own.log}", head)
    assert tail
    assert [line.removeprefix("  | ") for line in tail] == own.log.read_text().splitlines()[-len(tail) :]
    assert str(later.value) == str(pending.value)
    assert until(lambda: not process_group(own.pid), 5) < 5


@pytest.mark.slow
@pytest.mark.parametrize("role", ["scheduler", "detokenizer"])
async def test_a_killed_child_of_a_server_fails_what_is_in_flight_within_5_seconds(
    role: str, ray_session: None, tiny_model: Path, tmp_path: Path
) -> None:
    server = server_spec(without_end(tiny_model, tmp_path), tmp_path, name="engine 5")
    engine = remote(host_spec(tmp_path, name="engine 5", server=server))
    pid = (await engine.start(300))["pid"]
    child = next(each for each in process_group(pid) if f"sglang::{role}" in " ".join(each.cmdline()))

    task = await in_flight(engine, request(group_size=4, temperature=HOT, max_tokens=2000))
    child.kill()
    killed = time.monotonic()
    with pytest.raises(EngineError, match=rf"^engine 5 \(pid {pid}\) .*its last lines:\n  \| "):
        await asyncio.wait_for(task, 30)
    assert time.monotonic() - killed < 5
    assert until(lambda: not process_group(pid), 5) < 5
    ray.kill(engine.actor)


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
