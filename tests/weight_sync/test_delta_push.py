"""Delta pushes into a real engine: what it holds afterwards is what a full push would have put there."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.config.device import Dtype
from app.config.weight_sync import SyncMode, Verify
from app.errors import SyncError
from app.rollout.remote import RemoteEngine
from tests.conftest import make_engine
from tests.weight_sync.support import (
    TRANSPORTS,
    Proxy,
    Weights,
    address_of,
    checksum,
    engine_at,
    make_push,
    make_trainer,
    once,
    request,
    set_weights,
    started,
)

LOAD = {"ipc": "/update_weights_from_tensor", "collective": "/update_weights_from_distributed"}
STEP = 1e-5


@pytest.fixture(scope="module")
def sixteen(ray_session: None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """A trainer rank and an engine that compute in bfloat16."""
    import ray

    folder = tmp_path_factory.mktemp("sixteen")
    engine = make_engine(tiny_model, folder, dtype="bfloat16", max_total_tokens=2048)
    trainer = make_trainer(tiny_model, folder, dtype=Dtype.bfloat16)

    async def both() -> None:
        await asyncio.gather(engine.start(300), started(trainer))

    asyncio.run(both())
    yield trainer, engine
    asyncio.run(engine.stop())
    for actor in (engine.actor, *trainer.ranks):
        ray.kill(actor)


async def pushed_whole(trainer: Any, engines: list[Any], folder: Path, **shape: int) -> list[list[str]]:
    """The engines' checksums after a full push of what the trainer has now."""
    await (await make_push("ipc", trainer, engines, folder, verify=Verify.never, **shape)).sync(99)
    return [await checksum(engine) for engine in engines]


@pytest.mark.parametrize("bucket_mib", [0.05, 512.0])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_deltas_leave_the_engine_with_the_bits_of_a_full_push(
    transport: str, bucket_mib: float, sixteen: tuple[Any, Any], tmp_path: Path
) -> None:
    trainer, engine = sixteen

    async def scenario() -> None:
        await set_weights(trainer, 0)
        push = await make_push(
            transport, trainer, [engine], tmp_path, bucket_mib=bucket_mib, mode=SyncMode.delta, verify=Verify.always
        )
        full = await push.sync(0)
        assert full.changed_fraction is None
        assert full.bytes >= full.bytes_full
        for version in (1, 2, 3):
            await trainer.call("weights", Weights.step, seed=version, size=STEP)
            report = await push.sync(version)
            assert 0 < report.changed_fraction < 0.2
            assert report.bytes < 0.4 * report.bytes_full
        same = await push.sync(4)
        assert same.changed_fraction == 0
        assert same.metrics["sync/bytes"] < 0.05 * same.metrics["sync/bytes_full"]
        (completion, _) = await engine.generate(request())
        assert [span.version for span in completion.spans] == [4]
        found = await checksum(engine)
        await push.close()
        assert [found] == await pushed_whole(trainer, [engine], tmp_path)

    asyncio.run(scenario())


def test_a_full_push_comes_in_its_rhythm_and_after_a_change_of_engines(
    sixteen: tuple[Any, Any], tmp_path: Path
) -> None:
    trainer, engine = sixteen

    async def scenario() -> None:
        push = await make_push("ipc", trainer, [engine], tmp_path, mode=SyncMode.delta, full_every=3)
        full = [(await push.sync(version)).changed_fraction is None for version in range(7)]
        assert full == [True, False, False, True, False, False, True]
        push.set_engines({0: engine})
        assert (await push.sync(7)).changed_fraction == 0  # no change
        push.set_engines({0: RemoteEngine(engine.name, engine.actor)})
        assert (await push.sync(8)).changed_fraction is None
        assert (await push.sync(9)).changed_fraction == 0
        await push.prepare()  # as after a restart of the trainer
        assert (await push.sync(10)).changed_fraction is None
        await push.close()

    asyncio.run(scenario())


async def swallowed(incoming: Any, forward: Any) -> Any:
    """A message that the engine never sees, answered as SGLang alone would."""
    from aiohttp import web

    return web.json_response({"success": True, "message": "Success"})


async def twice(incoming: Any, forward: Any) -> Any:
    await forward()
    return await forward()


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (swallowed, "bucket 1.* answered 'Success' instead of 'took message 1"),
        (twice, "message 1 of policy 6 is out of"),
    ],
)
def test_a_message_that_gets_lost_or_comes_twice_fails_the_push_and_the_next_one_is_full(
    rule: Any, said: str, sixteen: tuple[Any, Any], tmp_path: Path
) -> None:
    trainer, engine = sixteen

    async def scenario() -> None:
        url, key = await address_of(engine)
        proxy = Proxy(url)
        try:
            behind = engine_at(proxy.url, key, tmp_path, "engine behind a proxy")
            await behind.start(60)
            push = await make_push("ipc", trainer, [behind], tmp_path, mode=SyncMode.delta, bucket_mib=0.05)
            push.verifier = type(push.verifier)(Verify.never, tmp_path)
            await push.sync(5)
            proxy.rules[LOAD["ipc"]] = once(rule, at=1)
            await trainer.call("weights", Weights.step, seed=6, size=STEP)
            with pytest.raises(SyncError, match=said):
                await push.sync(6)
            assert (await push.sync(7)).changed_fraction is None
            found = await checksum(engine)
            assert (await push.sync(8)).changed_fraction == 0
            await push.close()
            assert [found] == await pushed_whole(trainer, [engine], tmp_path)
        finally:
            proxy.stop()

    asyncio.run(scenario())
