"""Delta syncs into a real engine leave the same weights as a full sync."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.config.device import Dtype
from app.config.weight_sync import SyncMode, Verify
from app.errors import SyncError
from app.rollout.engine.remote import RemoteEngine
from tests.conftest import make_engine
from tests.rollout.support import address_of, engine_at
from tests.weight_sync.support import (
    Proxy,
    Weights,
    checksum,
    make_synchronizer,
    make_trainer,
    once,
    request,
    running,
    set_weights,
    sync_in_full,
)

STEP = 1e-5


@pytest.fixture(scope="module")
def bf16(ray_session: None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """A trainer rank and an engine in bfloat16."""
    folder = tmp_path_factory.mktemp("bf16")
    engine = make_engine(tiny_model, folder, dtype="bfloat16", max_total_tokens=2048)
    with running(engine, make_trainer(tiny_model, folder, dtype=Dtype.bfloat16)) as both:
        yield both


@pytest.mark.parametrize(("transport", "bucket_mib"), [("ipc", 0.05), ("collective", 512.0)])
async def test_deltas_leave_the_engine_with_the_bits_of_a_full_sync(
    transport: str, bucket_mib: float, bf16: tuple[Any, Any], tmp_path: Path
) -> None:
    trainer, engine = bf16

    await set_weights(trainer, 0)
    synchronizer = await make_synchronizer(
        transport, trainer, [engine], tmp_path, bucket_mib=bucket_mib, mode=SyncMode.delta, verify=Verify.always
    )
    full = await synchronizer.sync(0)
    assert full.changed_fraction is None
    assert full.bytes_full is not None
    assert full.bytes >= full.bytes_full
    for version in (1, 2, 3):
        await trainer.call("weights", Weights.step, seed=version, size=STEP)
        report = await synchronizer.sync(version)
        assert report.changed_fraction is not None
        assert report.bytes_full is not None
        assert 0 < report.changed_fraction < 0.2
        assert report.bytes < 0.4 * report.bytes_full
    unchanged = await synchronizer.sync(4)
    assert unchanged.changed_fraction == 0
    assert unchanged.metrics["sync/bytes"] < 0.05 * unchanged.metrics["sync/bytes_full"]
    (completion, _) = await engine.generate(request())
    assert [span.version for span in completion.spans] == [4]
    after_deltas = await checksum(engine)
    await synchronizer.close()
    assert after_deltas == await sync_in_full(trainer, engine, tmp_path)


async def test_a_full_sync_follows_a_change_of_engines(bf16: tuple[Any, Any], tmp_path: Path) -> None:
    trainer, engine = bf16

    synchronizer = await make_synchronizer("ipc", trainer, [engine], tmp_path, mode=SyncMode.delta)
    full = [(await synchronizer.sync(version)).changed_fraction is None for version in range(3)]
    assert full == [True, False, False]
    synchronizer.set_engines({0: engine})
    assert (await synchronizer.sync(3)).changed_fraction == 0  # no change
    synchronizer.set_engines({0: RemoteEngine(engine.name, engine.actor)})
    assert (await synchronizer.sync(4)).changed_fraction is None
    assert (await synchronizer.sync(5)).changed_fraction == 0
    await synchronizer.prepare()  # as after a restart of the trainer
    assert (await synchronizer.sync(6)).changed_fraction is None
    await synchronizer.close()


async def swallow(incoming: Any, forward: Any) -> Any:
    """Drop a message and reply as SGLang without the plugin would."""
    from aiohttp import web

    return web.json_response({"success": True, "message": "Success"})


async def test_a_lost_message_fails_the_sync_and_the_next_one_is_full(bf16: tuple[Any, Any], tmp_path: Path) -> None:
    trainer, engine = bf16

    url, key = await address_of(engine)
    proxy = Proxy(url)
    try:
        proxied = engine_at(proxy.url, key, tmp_path, "engine behind a proxy")
        await proxied.start(60)
        synchronizer = await make_synchronizer(
            "ipc", trainer, [proxied], tmp_path, mode=SyncMode.delta, bucket_mib=0.05
        )
        synchronizer.verifier = type(synchronizer.verifier)(Verify.never, tmp_path)
        await synchronizer.sync(5)
        proxy.rules["/update_weights_from_tensor"] = once(swallow, at=1)
        await trainer.call("weights", Weights.step, seed=6, size=STEP)
        with pytest.raises(SyncError, match=r"bucket 1.* replied 'Success'"):
            await synchronizer.sync(6)
        assert (await synchronizer.sync(3)).changed_fraction is None
        after_full = await checksum(engine)
        assert (await synchronizer.sync(4)).changed_fraction == 0
        await synchronizer.close()
        assert after_full == await sync_in_full(trainer, engine, tmp_path)
    finally:
        proxy.stop()
