"""Every process of a server, killed while it samples; a host, killed likewise."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

from app.errors import EngineError
from app.rollout.remote import RemoteEngine
from tests.rollout.support import HOT, host_spec, in_flight, process_group, remote, request, server_spec, without_end
from tests.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture
def started(ray_session: None, tiny_model: Path, tmp_path: Path) -> Iterator[tuple[RemoteEngine, int]]:
    """An engine whose host started its server, and the server's pid."""
    server = server_spec(without_end(tiny_model, tmp_path), tmp_path, name="engine 5")
    engine = remote(host_spec(tmp_path, name="engine 5", server=server))
    yield engine, asyncio.run(engine.start(300))["pid"]
    ray.kill(engine.actor)


def member(pid: int, role: str) -> psutil.Process:
    """The process of a server's process group with this title; "server" is the leader."""
    if role == "server":
        return psutil.Process(pid)
    return next(process for process in process_group(pid) if role in process.name() + " ".join(process.cmdline()))


@pytest.mark.parametrize("role", ["server", "scheduler", "detokenizer"])
async def test_whatever_dies_fails_what_is_in_flight_within_5_seconds(
    role: str, started: tuple[RemoteEngine, int]
) -> None:
    engine, pid = started

    task = await in_flight(engine, request(group_size=4, temperature=HOT, max_tokens=2000))
    os.kill(member(pid, role).pid, signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(EngineError) as failed:
        await asyncio.wait_for(task, 30)
    error, seconds = failed.value, time.monotonic() - killed
    assert seconds < 5
    assert str(error).startswith(f"engine 5 (pid {pid}) ")
    assert "its last lines:\n  | " in str(error)
    assert until(lambda: not process_group(pid), 5) < 5


async def test_a_working_server_ends_with_its_host(started: tuple[RemoteEngine, int]) -> None:
    engine, pid = started

    task = await in_flight(engine, request(group_size=4, temperature=HOT, max_tokens=2000))
    ray.kill(engine.actor)
    with pytest.raises(EngineError) as failed:
        await asyncio.wait_for(task, 10)
    result = failed.value
    assert str(result).startswith("engine 5: ")
    assert until(lambda: not process_group(pid), 5) < 5
