"""The host of an engine: what waits for admission, calls whose connection breaks, a start without a port."""

import asyncio
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from app.errors import EngineError, EngineLost
from app.rollout.engine import host as module
from app.rollout.engine import server_connection
from app.rollout.engine.client import ConnectionLost, Reply
from app.rollout.engine.host import EngineHost
from app.rollout.engine.server_connection import HostSpec
from app.types import Completion, EngineMemory, FinishReason, InFlight, VersionSpan
from tests.rollout.support import host_spec, request, server_spec


class SilentClient:
    """Its server obeys every call and never finishes a completion."""

    name = "engine 0"

    async def post(self, *_: object, **__: object) -> dict[str, Any]:
        return {}

    async def generate(self, *_: object, **__: object) -> list[object]:
        await asyncio.Event().wait()
        raise AssertionError


class BrokenClient(SilentClient):
    async def post(self, *_: object, **__: object) -> dict[str, Any]:
        raise ConnectionLost("engine 0: /pause_generation failed: ServerDisconnectedError")


def started(client: object, monkeypatch: pytest.MonkeyPatch, folder: Path) -> EngineHost:
    """A host of this client. Call it in a running event loop."""
    monkeypatch.setattr(module, "log_to", lambda path: None)
    monkeypatch.setattr(server_connection, "DEATH_TIMEOUT_S", 0.05)
    host = EngineHost(HostSpec("engine 0", 1.0, 1.0, folder / "host.log", url="http://127.0.0.1:1"))
    host._connection._client = client  # type: ignore[assignment]
    host._connection._failure = asyncio.get_running_loop().create_future()
    return host


async def test_an_abort_of_everything_includes_what_waits_for_admission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a prompt whose caller is gone would be admitted at `resume`, and refused to the next caller."""
    host = started(SilentClient(), monkeypatch, tmp_path)
    await host.pause(InFlight.drain)
    waiting = asyncio.create_task(host.generate(request("p/1@0")))
    await asyncio.sleep(0)
    await host.abort()
    await host.resume()
    with pytest.raises(EngineError, match="engine 0: prompt p/1@0"):
        await waiting

    again = asyncio.create_task(host.generate(request("p/1@0")))
    await asyncio.sleep(0.01)
    assert (await host.stats()).groups == 1
    again.cancel()


class Posts(SilentClient):
    """Its server answers `/pause_generation` when told to. Remembers what is sampled, with the key of its cache."""

    def __init__(self) -> None:
        self.answer = asyncio.Event()
        self.asked = asyncio.Event()
        self.sampled: list[tuple[str, str]] = []

    async def post(self, *arguments: object, **__: object) -> dict[str, Any]:
        if arguments[0] == "/pause_generation":
            await self.answer.wait()
        return {}

    async def generate(self, *arguments: Any, **settings: Any) -> list[object]:
        self.sampled.append((arguments[0].prompt_id, settings["cache_key"]))
        self.asked.set()
        return await super().generate()


@pytest.mark.parametrize("in_flight", InFlight)
async def test_a_request_during_a_pause_waits_and_does_not_reuse_the_cache_from_before(
    in_flight: InFlight, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampled before the server pauses, it would be cached under the key of what comes after the sync."""
    client = Posts()
    host = started(client, monkeypatch, tmp_path)
    before = asyncio.create_task(host.generate(request("before")))
    await asyncio.sleep(0)
    pausing = asyncio.create_task(host.pause(in_flight))
    await asyncio.sleep(0.01)
    during = asyncio.create_task(host.generate(request("during")))
    await asyncio.sleep(0.01)
    before.cancel()
    client.answer.set()
    await pausing
    await asyncio.sleep(0.01)
    assert [name for name, _ in client.sampled] == ["before"]

    client.asked.clear()
    await host.resume()
    await asyncio.wait_for(client.asked.wait(), 30)
    (_, first), (name, second) = client.sampled
    assert (name, first != second) == ("during", True)
    during.cancel()


class Routes(SilentClient):
    def __init__(self) -> None:
        self.posted: list[str] = []
        self.sampled = asyncio.Event()

    async def post(self, *arguments: Any, **__: object) -> dict[str, Any]:
        self.posted.append(arguments[0])
        return {}

    async def generate(self, *_: object, **__: object) -> list[object]:
        self.sampled.set()
        return await super().generate()


async def test_an_engine_that_a_sync_resumes_waits_for_its_released_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server would compute retracted requests at once, into a KV cache that is not there."""
    client = Routes()
    host = started(client, monkeypatch, tmp_path)
    host.spec = replace(host.spec, releases_memory=True)
    await host.pause(InFlight.retract)
    await host.release(list(EngineMemory))
    await host.reload((EngineMemory.weights,))
    await host.resume()
    waiting = asyncio.create_task(host.generate(request("p/1@0")))
    await asyncio.sleep(0.01)
    assert client.posted == ["/pause_generation", "/release_memory_occupation", "/resume_memory_occupation"]
    assert not client.sampled.is_set()

    await host.reload((EngineMemory.graphs, EngineMemory.kv_cache))
    assert client.posted[3:] == ["/resume_memory_occupation", "/continue_generation"]
    await asyncio.wait_for(client.sampled.wait(), 30)
    waiting.cancel()


@pytest.mark.parametrize(("in_flight", "counted", "left"), [("retract", 5, 3), ("retract", 1, 0), ("in_place", 5, 5)])
async def test_the_retractions_of_two_syncs_are_not_those_of_a_full_cache(
    in_flight: str, counted: int, left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused = asyncio.Event()

    async def generate(*_: object, **__: object) -> list[Reply]:
        await paused.wait()
        one, spans = np.zeros(1, dtype=np.int32), (VersionSpan(0, 0, 1),)
        return [Reply(Completion(one, one, FinishReason.stop, spans, retractions=counted), None)]

    client = SilentClient()
    monkeypatch.setattr(client, "generate", generate)
    host = started(client, monkeypatch, tmp_path)
    sampling = asyncio.create_task(host.generate(request(group_size=1)))
    await asyncio.sleep(0)
    for _ in range(2):
        await host.pause(InFlight[in_flight])
        await host.resume()
    paused.set()
    assert [each.retractions for each in await sampling] == [left]


async def test_an_engine_is_lost_when_the_connection_of_a_control_call_breaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = started(BrokenClient(), monkeypatch, tmp_path)
    host._connection._server = SimpleNamespace()  # type: ignore[assignment]  # one that is still alive
    with pytest.raises(EngineLost, match="/pause_generation failed"):
        await host.pause(InFlight.retract)


async def test_a_start_ends_when_another_program_took_the_port(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang would wait for its own warm-up for ever, and the host for `start_timeout_s`."""
    monkeypatch.setattr(module, "log_to", lambda path: None)
    server = server_spec(tiny_model, tmp_path, name="engine 0")

    host = EngineHost(host_spec(tmp_path, name="engine 0", server=server, start_timeout_s=3600))
    starting = asyncio.create_task(host.start())
    while host._connection._server is None or host._connection._server._process is None:  # noqa: ASYNC110 (no event says so)
        await asyncio.sleep(0.01)

    with socket.socket() as taker:
        taker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taker.bind(("127.0.0.1", host._connection._server.spec.port))
        taker.listen()
        with pytest.raises(EngineError, match=r"engine 0: .*127\.0\.0\.1:\d+; log: "):
            await starting
    await host.stop()


async def test_regions_are_released_and_reloaded_by_one_call_and_each_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []

    async def control(*arguments: Any) -> None:
        calls.append(arguments)

    host = started(SilentClient(), monkeypatch, tmp_path)
    host.spec = replace(host.spec, releases_memory=True)
    monkeypatch.setattr(host._connection, "control", control)
    await host.pause(InFlight.retract)
    await host.release([EngineMemory.graphs])
    for _ in range(2):
        await host.release(list(EngineMemory))
    for regions in ([EngineMemory.weights], EngineMemory, EngineMemory):
        await host.reload(list(regions))
    assert [(route, body["tags"]) for route, body in calls[1:]] == [
        ("/release_memory_occupation", ["cuda_graph"]),
        ("/release_memory_occupation", ["weights", "kv_cache"]),
        ("/resume_memory_occupation", ["weights"]),
        ("/resume_memory_occupation", ["kv_cache", "cuda_graph"]),
    ]
