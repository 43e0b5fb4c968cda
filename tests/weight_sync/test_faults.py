"""What goes wrong on the way to one engine: the error names the place, comes in time, and the next push is whole."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from app.config.weight_sync import Verify
from app.errors import EngineError, SyncError
from tests.weight_sync.support import (
    TRANSPORTS,
    Rule,
    address_of,
    checksum,
    delay_reply,
    drop_reply,
    engine_at,
    make_push,
    once,
    refuse,
    request,
    set_weights,
)

TIMEOUT_S = 3.0
LOAD = {"ipc": "/update_weights_from_tensor", "collective": "/update_weights_from_distributed"}
CASES = [
    *(
        (transport, "load", refuse, "bucket 1 of 9.*engine behind a proxy.*refused by the test")
        for transport in TRANSPORTS
    ),
    *(
        (transport, "load", drop_reply, "bucket 1 of 9 within.*no answer from engine behind")
        for transport in TRANSPORTS
    ),
    ("collective", "/init_weights_update_group", refuse, "building the process group.*refused by the test"),
    ("collective", "/begin_weight_update", refuse, "begin.*refused by the test"),
    ("ipc", "/pause_generation", drop_reply, "pause.*engine behind a proxy: no answer within"),
    ("ipc", "/continue_generation", drop_reply, "resume within.*engine behind a proxy"),
]


@pytest.mark.parametrize(("transport", "where", "rule", "said"), CASES)
def test_a_spoiled_call_fails_the_push_in_time_and_the_next_one_is_whole(
    transport: str, where: str, rule: Rule, said: str, trainer: Any, engine: Any, proxied: Any, tmp_path: Path
) -> None:
    async def scenario() -> None:
        await set_weights(trainer, 1)
        right = await pushed_directly(trainer, engine, tmp_path)
        await set_weights(trainer, 0)
        await pushed_directly(trainer, engine, tmp_path)
        await set_weights(trainer, 1)
        proxy, spoiled = proxied
        route = LOAD[transport] if where == "load" else where
        proxy.rules[route] = once(rule, at=1 if where == "load" else 0)
        push = await make_push(
            transport, trainer, [spoiled], tmp_path, bucket_mib=0.05, verify=Verify.never, timeout_s=TIMEOUT_S
        )
        began = time.monotonic()
        with pytest.raises(SyncError, match=said):
            await push.sync(1)
        assert time.monotonic() - began < TIMEOUT_S + 5
        if where != "/continue_generation":
            assert "/continue_generation" not in proxy.seen  # it may hold weights of two policies
        report = await push.sync(2)
        assert report.group_reused == (transport == "ipc")
        assert await checksum(engine) == right
        (completion, _) = await spoiled.generate(request())
        assert completion.spans[-1].version == 2

    asyncio.run(scenario())


async def pushed_directly(trainer: Any, engine: Any, folder: Path) -> list[str]:
    push = await make_push("ipc", trainer, [engine], folder, verify=Verify.never)
    await push.sync(0)
    return await checksum(engine)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_reply_that_is_late_within_the_deadline_does_no_harm(
    transport: str, trainer: Any, proxied: Any, tmp_path: Path
) -> None:
    async def scenario() -> None:
        proxy, slow = proxied
        proxy.rules[LOAD[transport]] = once(delay_reply(1.0))
        push = await make_push(transport, trainer, [slow], tmp_path, bucket_mib=0.05, timeout_s=30)
        assert (await push.sync(1)).seconds["load"] > 1.0

    asyncio.run(scenario())


def test_a_wrong_key_is_refused_and_said(trainer: Any, engine: Any, tmp_path: Path) -> None:
    async def scenario() -> None:
        url, _ = await address_of(engine)
        stranger = engine_at(url, "wrong", tmp_path, "engine with a wrong key")
        with pytest.raises(EngineError, match="HTTP 401"):
            await stranger.start(30)
        push = await make_push("collective", trainer, [stranger], tmp_path, timeout_s=TIMEOUT_S)
        with pytest.raises(SyncError, match=r"pause: engine with a wrong key.*HTTP 401"):
            await push.sync(1)

    asyncio.run(scenario())


def test_an_engine_that_differs_is_named_with_its_parameter(
    trainer: Any, engine: Any, proxied: Any, tmp_path: Path
) -> None:
    """The export is loaded through a proxy that does not load it: what it verifies against is not what was pushed."""

    async def leave_out(incoming: Any, forward: Any) -> Any:
        await set_weights(trainer, 0)
        other = await make_push("ipc", trainer, [engine], tmp_path, verify=Verify.never)
        await other.sync(1)
        return web.json_response({"success": True, "message": "not loaded"})

    async def scenario() -> None:
        proxy, spoiled = proxied
        proxy.rules["/update_weights_from_disk"] = leave_out
        await set_weights(trainer, 1)
        push = await make_push("ipc", trainer, [spoiled], tmp_path, verify=Verify.first)
        with pytest.raises(SyncError, match=r"differs from the exported checkpoint in .*weight \(rank 0\)"):
            await push.sync(1)
        assert "/continue_generation" not in proxy.seen
        await spoiled.resume()

    asyncio.run(scenario())
