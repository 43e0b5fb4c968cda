"""Which adapter requests name, and what is unloaded when, on a double of the server."""

import asyncio
import logging
import re
from collections.abc import Mapping
from typing import Any

import pytest

from app.errors import EngineError
from app.rollout.engine.client import NoAnswer
from app.rollout.engine.served_adapters import Adapter, Adapters

BODY: dict[str, Any] = {"config_dict": {}, "serialized_named_tensors": [""], "load_format": None}


class Double:
    """A server's adapters. `failures` holds errors of the next calls, by route; `abort` ends the requests at once."""

    def __init__(self, limit: int = 4) -> None:
        self.loaded: list[str] = []
        self.failures: dict[str, list[EngineError]] = {}
        self.ending: dict[Adapter, asyncio.Event] = {}
        self.adapters = Adapters("engine 0", "h", limit=limit, abort_timeout_s=0.2, post=self.post, abort=self.abort)

    async def post(self, route: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        name = str(body["lora_name"])
        verb = {"/load_lora_adapter_from_tensors": "+", "/unload_lora_adapter": "-"}[route]
        await asyncio.sleep(0)
        if self.failures.get(verb):
            raise self.failures[verb].pop(0)
        if verb == "+":
            self.loaded.append(name)
        else:
            self.loaded.remove(name)
        return {"loaded_adapters": dict.fromkeys(self.loaded, "__tensor__")}

    async def abort(self, adapter: Adapter) -> None:
        if adapter in self.ending:
            self.ending.pop(adapter).set()

    async def request(self) -> None:
        """Begin a request, which ends when it is aborted."""
        ended = asyncio.Event()
        begun = asyncio.Event()

        async def run() -> None:
            with self.adapters.for_request() as adapter:
                self.ending[adapter] = ended
                begun.set()
                await ended.wait()

        self.task = asyncio.create_task(run())
        await begun.wait()


async def test_every_load_has_a_name_of_its_own_and_later_requests_use_it() -> None:
    server = Double()
    with pytest.raises(EngineError, match="engine 0 has no adapter"), server.adapters.for_request():
        pass
    for version, name in ((7, "policy-v7-h-0"), (8, "policy-v8-h-1"), (7, "policy-v7-h-2")):
        assert await server.adapters.load(version, BODY) == 1
        assert server.loaded == [name]
        with server.adapters.for_request() as adapter:
            assert (adapter.name, adapter.version) == (name, version)


async def test_an_adapter_whose_load_was_not_answered_is_unloaded_later() -> None:
    """The server may have it all the same."""
    server = Double()
    await server.adapters.load(1, BODY)
    server.failures["+"] = [NoAnswer("no answer")]
    with pytest.raises(NoAnswer):
        await server.adapters.load(2, BODY)
    server.loaded.append("policy-v2-h-1")
    assert await server.adapters.load(3, BODY) == 1
    assert server.loaded == ["policy-v3-h-2"]


async def test_the_oldest_requests_are_aborted_when_the_server_holds_no_more(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        server = Double(limit=3)
        for version in (1, 2, 3):
            await server.adapters.load(version, BODY)
            await server.request()
        assert await server.adapters.load(4, BODY) == 3
        assert server.loaded == ["policy-v2-h-1", "policy-v3-h-2", "policy-v4-h-3"]
        assert [adapter.version for adapter in server.ending] == [2, 3]
    (warning,) = caplog.messages
    assert re.search("engine 0: .* 1 requests of policy 1", warning)


async def test_requests_that_do_not_end_when_aborted_fail_the_load() -> None:
    server = Double(limit=2)
    await server.adapters.load(1, BODY)
    await server.request()
    await server.adapters.load(2, BODY)
    server.ending.clear()
    with pytest.raises(EngineError, match=r"engine 0: .*policy 1 .*within"):
        await server.adapters.load(3, BODY)
    assert server.loaded == ["policy-v1-h-0", "policy-v2-h-1"]
