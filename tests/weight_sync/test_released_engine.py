"""A real server through one turn of colocate: its memory is released, and it gets new weights before its KV cache."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from app.config.weight_sync import Verify
from app.placement.time_sharing import CACHES
from app.types import EngineMemory, InFlight
from tests.rollout.support import largest_difference
from tests.weight_sync.support import make_synchronizer, request, set_weights

SEED = 3


async def test_a_released_engine_is_reloaded_and_samples_from_the_weights_synced_in_between(
    trainer: Any, engine: Any, tiny_model: Path, tmp_path: Path
) -> None:
    """On a CPU SGLang frees nothing, but takes the calls, in the order in which they must come."""

    ray.get(engine.actor.__ray_call__.remote(set_releases_memory, True))
    synchronizer = await make_synchronizer("ipc", trainer, [engine], tmp_path, verify=Verify.never)
    for version in (60, 61):  # a second release after a reload
        await set_weights(trainer, SEED)
        await engine.pause(InFlight.drain)
        await engine.release((*CACHES, EngineMemory.weights))
        await engine.release(CACHES)  # idempotent: SGLang would crash
        assert await engine.actor.__ray_call__.remote(released) == set(EngineMemory)
        await engine.check()  # the scheduler answers

        await engine.reload((EngineMemory.weights,))
        await synchronizer.sync(version)
        await engine.reload(CACHES)
        await engine.reload(CACHES)
        assert await engine.actor.__ray_call__.remote(released) == set()

        given = request()
        completions = await engine.generate(given)
        assert {span.version for completion in completions for span in completion.spans} == {version}
        assert largest_difference(tiny_model, [given], [completions], seed=SEED) < 1e-4
    ray.get(engine.actor.__ray_call__.remote(set_releases_memory, False))


def set_releases_memory(host: Any, releases_memory: bool) -> None:
    """Make an engine's host call the routes that it skips on a CPU."""
    host.spec = replace(host.spec, releases_memory=releases_memory)


def released(host: Any) -> set[EngineMemory]:
    return set(host._released)
