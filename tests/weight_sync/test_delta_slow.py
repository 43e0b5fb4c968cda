"""Fifty delta pushes between every shape of trainer and engine, beside full ones. Run with `-m soak`."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from app.config.device import Dtype
from app.config.model import Family, ModelConfig, TinyConfig
from app.config.weight_sync import SyncMode, Verify
from app.model.hf_directory import locate
from tests.conftest import make_engine
from tests.weight_sync.support import (
    TRANSPORTS,
    Weights,
    checksum,
    make_push,
    make_trainer,
    request,
    set_weights,
    started,
)
from tests.weight_sync.test_slow import RESULT, bind_ranks, killed

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]
STEPS = 50
STEP = 1e-6


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("family", list(Family))
def test_fifty_deltas_are_bit_equal_to_a_full_push_and_a_replaced_engine_gets_one(
    family: Family, width: int, ray_session: None, tmp_path: Path
) -> None:
    model = locate(ModelConfig(tiny=TinyConfig(family=family)), seed=0)
    flags = {"dtype": "bfloat16", "tp_size": width, "max_total_tokens": 2048}
    if family is Family.qwen35:
        flags["disable_radix_cache"] = True

    async def scenario() -> dict[str, Any]:
        engines = [make_engine(model, tmp_path, name=f"engine {i}", **flags) for i in range(2)]
        trainers = {
            ranks: make_trainer(model, tmp_path / f"{ranks}", ranks=ranks, dtype=Dtype.bfloat16) for ranks in (1, 2)
        }
        actors = [*(engine.actor for engine in engines), *(rank for each in trainers.values() for rank in each.ranks)]
        found = {}
        with killed(*actors):
            for engine in engines:
                await engine.actor.__ray_call__.remote(bind_ranks)
                await engine.start(600)
            for ranks, trainer in trainers.items():
                await started(trainer)
                for transport in TRANSPORTS:
                    # a handle serves as many engine ranks as there are trainer ranks
                    if transport == "ipc" and ranks < width:
                        continue
                    key = f"{family.name}, {transport}, {ranks} trainer rank(s), engine of {width}"
                    found[key] = await deltas(transport, trainer, engines, tmp_path, width)
        return found

    found = asyncio.run(scenario())
    known = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    RESULT.write_text(json.dumps({**known, "delta": {**known.get("delta", {}), **found}}, indent=2) + "\n")


async def deltas(transport: str, trainer: Any, engines: list[Any], folder: Path, width: int) -> dict[str, Any]:
    """Steps pushed into the first engine, then into the second one in its place; returns what was compared."""
    fractions, first = [], engines[0]
    await set_weights(trainer, 0)
    push = await pushing(transport, trainer, [first], folder, width, SyncMode.delta)
    assert (await push.sync(0)).changed_fraction is None
    for version in range(1, STEPS + 1):
        await trainer.call("weights", Weights.step, seed=version, size=STEP)
        report = await push.sync(version)
        assert report.changed_fraction is not None
        fractions.append(report.changed_fraction)
        if version in (1, STEPS):
            found = await checksum(first)
            await push.close()  # its sender makes room for the full push's
            await push.carrier.abandon(push.ranks)
            whole = await pushing(transport, trainer, [first], folder, width, SyncMode.full)
            await whole.sync(version)
            assert await checksum(first) == found
            await whole.close()
            await whole.carrier.abandon(whole.ranks)
            push = await pushing(transport, trainer, [first], folder, width, SyncMode.delta)
            assert (await push.sync(version)).changed_fraction is None
    push.set_engines({0: engines[1]})  # as when the first one was lost
    assert (await push.sync(STEPS + 1)).changed_fraction is None
    assert (await push.sync(STEPS + 2)).changed_fraction == 0
    assert await checksum(engines[1]) == await checksum(first)
    (completion, _) = await engines[1].generate(request())
    assert [span.version for span in completion.spans] == [STEPS + 2]
    await push.close()
    await push.carrier.abandon(push.ranks)
    return {"steps": STEPS, "changed_fraction": round(sum(fractions) / STEPS, 4), "bit_equal": True}


async def pushing(transport: str, trainer: Any, engines: list[Any], folder: Path, width: int, mode: SyncMode) -> Any:
    return await make_push(
        transport,
        trainer,
        engines,
        folder,
        bucket_mib=0.05,
        verify=Verify.never,
        tensor_parallel=width,
        mode=mode,
    )
