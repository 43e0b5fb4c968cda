"""A real server through one turn of colocate: its memory is released, and it gets new weights before its KV cache."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from app.config.weight_sync import Verify
from app.errors import EngineError
from app.placement.time_sharing import CACHES
from app.types import Completion, EngineMemory, FinishReason, InFlight
from tests.rollout.support import noisy_model, transformers_logprobs
from tests.weight_sync.support import make_synchronizer, set_weights
from tests.weight_sync.test_synchronizer import caught, endless


async def test_a_retracted_group_continues_under_the_next_policy_after_its_memory_was_released(
    trainer: Any, engine: Any, tiny_model: Path, tmp_path: Path
) -> None:
    """Two cuts: each part of a completion has the log-probabilities of the policy that its span names.

    On a CPU SGLang frees nothing, but takes the calls, in the order in which they must come.
    """

    async def through_two_syncs(first: int, seconds: float) -> list[Completion]:
        await set_weights(trainer, first)
        await synchronizer.sync(first)
        group = asyncio.create_task(engine.generate(endless(600, version=first)))
        for version in (first + 1, first + 2):
            await asyncio.sleep(seconds)
            await engine.pause(InFlight.retract)
            await engine.release((*CACHES, EngineMemory.weights))
            await engine.release(CACHES)  # idempotent: SGLang would crash
            await engine.check()
            await set_weights(trainer, version)
            await engine.reload((EngineMemory.weights,))
            await synchronizer.sync(version)
            await engine.reload(CACHES)
        return await group

    ray.get(engine.actor.__ray_call__.remote(set_releases_memory, True))
    synchronizer = await make_synchronizer(
        "ipc", trainer, [engine], tmp_path, verify=Verify.never, in_flight=InFlight.retract
    )
    completions = await caught(through_two_syncs, lambda first: (first, first + 1, first + 2))
    ray.get(engine.actor.__ray_call__.remote(set_releases_memory, False))

    given = endless(600, version=0)
    for completion in completions:
        assert len(completion.token_ids) == len(completion.logprobs) == completion.spans[-1].end
        for span in completion.spans:
            expected = transformers_logprobs(noisy_model(tiny_model, span.version), completion, given)
            np.testing.assert_allclose(
                completion.logprobs[span.start : span.end], expected[span.start : span.end], atol=1e-4
            )


async def test_a_retracted_group_can_be_aborted_while_its_memory_is_released(engine: Any) -> None:
    """As before a trainer that failed starts again."""
    ray.get(engine.actor.__ray_call__.remote(set_releases_memory, True))
    group = asyncio.create_task(engine.generate(endless(2000, version=0)))
    await asyncio.sleep(0.5)
    await engine.pause(InFlight.retract)
    await engine.release(CACHES)
    await engine.abort()
    assert FinishReason.abort in {each.finish_reason for each in await asyncio.wait_for(group, 30)}
    assert (await engine.stats()).groups == 0
    await engine.reload(CACHES)
    await engine.resume()
    ray.get(engine.actor.__ray_call__.remote(set_releases_memory, False))


async def test_memory_of_requests_that_keep_their_cache_is_not_released(engine: Any) -> None:
    await engine.pause(InFlight.in_place)
    with pytest.raises(EngineError):
        await engine.release(CACHES)
    await engine.resume()


def set_releases_memory(host: Any, releases_memory: bool) -> None:
    """Make an engine's host call the routes that it skips on a CPU."""
    host.spec = replace(host.spec, releases_memory=releases_memory)
