"""Fifty delta syncs between every shape of trainer and engine, compared with full syncs. Run with `-m slow`."""

import json
from pathlib import Path
from typing import Any

import pytest

from app.config.device import Dtype
from app.config.model import TINY_MODELS
from app.config.weight_sync import SyncMode, Verify
from tests.conftest import make_engine
from tests.weight_sync.support import (
    TRANSPORTS,
    Weights,
    checksum,
    make_synchronizer,
    make_trainer,
    request,
    set_weights,
    started,
)
from tests.weight_sync.test_slow import RESULT, bind_ranks, killed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
STEPS = 50
STEP = 1e-6


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("family", ["qwen3", "qwen35"])
async def test_fifty_deltas_are_bit_equal_to_a_full_push_and_a_replaced_engine_gets_one(
    family: str, width: int, ray_session: None, tmp_path: Path
) -> None:
    model = TINY_MODELS / {"qwen3": "tiny", "qwen35": "tiny_qwen35"}[family]
    flags: dict[str, Any] = {"dtype": "bfloat16", "tp_size": width, "max_total_tokens": 2048}
    if family == "qwen35":
        flags["disable_radix_cache"] = True

    engines = [make_engine(model, tmp_path, name=f"engine {i}", **flags) for i in range(2)]
    trainers = {
        ranks: make_trainer(model, tmp_path / f"{ranks}", ranks=ranks, dtype=Dtype.bfloat16) for ranks in (1, 2)
    }
    actors = [*(engine.actor for engine in engines), *(rank for each in trainers.values() for rank in each.ranks)]
    results = {}
    with killed(*actors):
        for engine in engines:
            await engine.actor.__ray_call__.remote(bind_ranks)
            await engine.start(600)
        for ranks, trainer in trainers.items():
            await started(trainer)
            for transport in TRANSPORTS:
                # IPC handles need one trainer rank for each engine rank
                if transport == "ipc" and ranks < width:
                    continue
                key = f"{family}, {transport}, {ranks} trainer rank(s), engine of {width}"
                results[key] = await deltas(transport, trainer, engines, tmp_path, width)
    known = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    RESULT.write_text(json.dumps({**known, "delta": {**known.get("delta", {}), **results}}, indent=2) + "\n")


async def deltas(transport: str, trainer: Any, engines: list[Any], folder: Path, width: int) -> dict[str, Any]:
    """Sync every step into the first engine, then into the second in its place; return the comparison."""
    fractions, first = [], engines[0]
    await set_weights(trainer, 0)
    synchronizer = await small_buckets(transport, trainer, [first], folder, width, SyncMode.delta)
    assert (await synchronizer.sync(0)).changed_fraction is None
    for version in range(1, STEPS + 1):
        await trainer.call("weights", Weights.step, seed=version, size=STEP)
        report = await synchronizer.sync(version)
        assert report.changed_fraction is not None
        fractions.append(report.changed_fraction)
        if version in (1, STEPS):
            after_delta = await checksum(first)
            await synchronizer.close()  # frees its sender's memory for the full sync
            await synchronizer.abort()
            full = await small_buckets(transport, trainer, [first], folder, width, SyncMode.full)
            await full.sync(version)
            assert await checksum(first) == after_delta
            await full.close()
            await full.abort()
            synchronizer = await small_buckets(transport, trainer, [first], folder, width, SyncMode.delta)
            assert (await synchronizer.sync(version)).changed_fraction is None
    synchronizer.set_engines({0: engines[1]})  # as when the first one was lost
    assert (await synchronizer.sync(STEPS + 1)).changed_fraction is None
    assert (await synchronizer.sync(STEPS + 2)).changed_fraction == 0
    assert await checksum(engines[1]) == await checksum(first)
    (completion, _) = await engines[1].generate(request())
    assert [span.version for span in completion.spans] == [STEPS + 2]
    await synchronizer.close()
    await synchronizer.abort()
    return {"steps": STEPS, "changed_fraction": round(sum(fractions) / STEPS, 4), "bit_equal": True}


async def small_buckets(
    transport: str, trainer: Any, engines: list[Any], folder: Path, width: int, mode: SyncMode
) -> Any:
    return await make_synchronizer(
        transport,
        trainer,
        engines,
        folder,
        bucket_mib=0.05,
        verify=Verify.never,
        tensor_parallel=width,
        mode=mode,
    )
