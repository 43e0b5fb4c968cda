"""Faults in a sync to one engine: the error names engine and phase, comes in time, and the next sync is complete."""

import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from app.config.weight_sync import Verify
from app.errors import SyncError
from tests.weight_sync.support import (
    Rule,
    checksum,
    drop_reply,
    make_synchronizer,
    once,
    refuse,
    request,
    restore,
    set_weights,
    sync_in_full,
)

TIMEOUT_S = 3.0
LOADS = ("/update_weights_from_tensor", "/update_weights_from_distributed")  # of which the second fails
CASES = [
    ("ipc", LOADS[0], refuse, "bucket 1 of 9.*engine behind a proxy.*refused by the test"),
    ("collective", LOADS[1], drop_reply, "bucket 1 of 9 within.*no reply from engine behind"),
    ("collective", "/init_weights_update_group", refuse, "building the process group.*refused by the test"),
    ("ipc", "/pause_generation", drop_reply, "pause.*engine behind a proxy: no reply within"),
    ("ipc", "/continue_generation", drop_reply, "resume within.*engine behind a proxy"),
]


@pytest.mark.parametrize(("transport", "route", "rule", "message"), CASES)
async def test_a_faulty_call_fails_the_sync_in_time_and_the_next_one_is_complete(
    transport: str, route: str, rule: Rule, message: str, trainer: Any, engine: Any, proxied: Any, tmp_path: Path
) -> None:
    await set_weights(trainer, 1)
    expected = await sync_in_full(trainer, engine, tmp_path)
    await restore(trainer, engine, tmp_path)
    await set_weights(trainer, 1)
    proxy, faulty = proxied
    proxy.rules[route] = once(rule, at=1 if route in LOADS else 0)
    synchronizer = await make_synchronizer(
        transport, trainer, [faulty], tmp_path, bucket_mib=0.05, verify=Verify.never, timeout_s=TIMEOUT_S
    )
    began = time.monotonic()
    with pytest.raises(SyncError, match=message):
        await synchronizer.sync(1)
    assert time.monotonic() - began < TIMEOUT_S + 5
    if route != "/continue_generation":
        assert "/continue_generation" not in proxy.seen  # it may hold weights of two policies
    report = await synchronizer.sync(2)
    assert report.group_reused == (transport == "ipc")
    assert await checksum(engine) == expected
    (completion, _) = await faulty.generate(request())
    assert completion.spans[-1].version == 2


async def test_an_engine_that_differs_is_named_with_its_parameter(
    trainer: Any, engine: Any, proxied: Any, tmp_path: Path
) -> None:
    """A proxy loads other weights instead of the export, so the verification has to fail."""

    async def load_other_weights(incoming: Any, forward: Any) -> Any:
        await set_weights(trainer, 0)
        other = await make_synchronizer("ipc", trainer, [engine], tmp_path, verify=Verify.never)
        await other.sync(1)
        return web.json_response({"success": True, "message": "not loaded"})

    proxy, faulty = proxied
    proxy.rules["/update_weights_from_disk"] = load_other_weights
    await set_weights(trainer, 1)
    synchronizer = await make_synchronizer("ipc", trainer, [faulty], tmp_path, verify=Verify.first)
    with pytest.raises(SyncError, match=r"exported checkpoint .*weight \(rank 0\)"):
        await synchronizer.sync(1)
    assert "/continue_generation" not in proxy.seen
    await faulty.resume()
