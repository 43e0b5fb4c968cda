"""A sync loads exactly the trainer's weights into a real server, over both transports, idle or busy."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.config.weight_sync import Verify
from app.types import SYNC_PHASES, Completion, InFlight
from tests.rollout.support import largest_difference, noisy_model, transformers_logprobs
from tests.weight_sync.support import TRANSPORTS, checksum, make_synchronizer, request, restore, set_weights

LARGEST_MIB = 0.05  # smaller than some tensors of the tiny model, larger than others


@pytest.mark.parametrize("bucket_mib", [LARGEST_MIB, 512.0])
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_sync_equals_loading_the_export(
    transport: str, bucket_mib: float, trainer: Any, engine: Any, tmp_path: Path
) -> None:
    before = await restore(trainer, engine, tmp_path)
    await set_weights(trainer, 1)
    synchronizer = await make_synchronizer(transport, trainer, [engine], tmp_path, bucket_mib=bucket_mib)
    report = await synchronizer.sync(7)  # verify=first compares with the export, or raises
    assert await checksum(engine) != before
    assert report.bytes == sum(bucket.bytes for bucket in synchronizer._buckets)
    assert (report.buckets == 1) == (bucket_mib == 512.0)
    assert tuple(report.seconds) == (*SYNC_PHASES, "total")
    assert all(seconds > 0 for seconds in report.seconds.values())
    await set_weights(trainer, 0)
    assert (await synchronizer.sync(8)).group_reused
    assert await checksum(engine) == before
    assert not (tmp_path / "verify").exists()


@pytest.mark.parametrize("in_flight", list(InFlight))
async def test_generation_continues_through_a_sync(
    in_flight: InFlight, trainer: Any, engine: Any, tmp_path: Path
) -> None:
    """drain: all tokens of the old policy; retract and in_place: both policies, in the order of their syncs."""

    async def around_a_sync(old: int, seconds: float) -> list[Completion]:
        """Return the members of a group requested `seconds` before the sync of policy `old + 1`."""
        await synchronizer.sync(old)
        await set_weights(trainer, old)
        generating = asyncio.create_task(engine.generate(endless(600, version=old)))
        await asyncio.sleep(seconds)
        await synchronizer.sync(old + 1)
        completions = await generating
        for completion in completions:
            assert completion.spans[0].start == 0
            assert completion.spans[-1].end == len(completion.token_ids) == len(completion.logprobs)
        (after, _) = await engine.generate(request())
        assert [span.version for span in after.spans] == [old + 1]
        # a member may end before the sync (old policy alone) or begin after it (new policy alone)
        assert {versions_of(each) for each in completions} <= {(old,), (old + 1,), (old, *newer(old))}
        return completions

    def newer(old: int) -> tuple[int, ...]:
        return () if in_flight is InFlight.drain else (old + 1,)

    synchronizer = await make_synchronizer(
        "collective", trainer, [engine], tmp_path, verify=Verify.never, in_flight=in_flight
    )
    assert await caught(around_a_sync, lambda old: (old, *newer(old)))


@pytest.mark.parametrize("in_flight", list(InFlight))
async def test_requests_after_a_sync_use_no_cache_of_older_weights(
    in_flight: InFlight, trainer: Any, engine: Any, tiny_model: Path, tmp_path: Path
) -> None:
    """in_place keeps the cache for requests in flight; it may also hold the prompts of others."""
    synchronizer = await make_synchronizer("ipc", trainer, [engine], tmp_path, verify=Verify.never, in_flight=in_flight)
    for version, seed in ((30, 0), (31, 2), (32, 1)):
        await set_weights(trainer, seed)
        await synchronizer.sync(version)
        for _ in range(2):  # the second may hit the first one's prompt in the cache
            given = request()
            completions = await engine.generate(given)
            assert {span.version for completion in completions for span in completion.spans} == {version}
            assert largest_difference(tiny_model, [given], [completions], seed=seed) < 1e-4


async def test_a_token_sampled_before_a_sync_in_place_does_not_count_as_sampled_after_it(
    trainer: Any, engine: Any, tiny_model: Path, tmp_path: Path
) -> None:
    """SGLang's overlap scheduler keeps a sampled batch through the sync, and labels it with the new version."""
    given = endless(600, version=50)

    async def through_a_sync(version: int, seconds: float) -> list[Completion]:
        """Return the members of a group requested `seconds` before a pause for the sync of policy `version + 1`."""
        await set_weights(trainer, 1)
        await synchronizer.sync(version)
        group = asyncio.create_task(engine.generate(replace(given, version=version)))
        await asyncio.sleep(seconds)
        await engine.pause(InFlight.in_place)
        await set_weights(trainer, 2)
        await synchronizer.sync(version + 1)
        return await group

    synchronizer = await make_synchronizer(
        "ipc", trainer, [engine], tmp_path, verify=Verify.never, in_flight=InFlight.in_place
    )
    completions = await caught(through_a_sync, lambda old: (old, old + 1))

    policy = noisy_model(tiny_model, 1)
    of_the_old_policy = 0
    for completion in completions:
        same = np.abs(completion.logprobs - transformers_logprobs(policy, completion, given)) < 1e-5
        boundary = completion.spans[1].start
        assert same[: boundary - 1].all()  # the one before the boundary may be of either policy
        of_the_old_policy += int(same[boundary])
    assert of_the_old_policy < len(completions) / 2  # a few may be equal by chance


def versions_of(completion: Completion) -> tuple[int, ...]:
    return tuple(span.version for span in completion.spans)


async def caught(
    attempt: Callable[[int, float], Awaitable[list[Completion]]], wanted: Callable[[int], tuple[int, ...]]
) -> list[Completion]:
    """Return the completions of an attempt that have the wanted versions."""
    seconds = 0.1
    for old in range(10, 50, 2):
        completions = await attempt(old, seconds)
        if found := [each for each in completions if versions_of(each) == wanted(old)]:
            return found
        ended = any(versions_of(each) == (old,) for each in completions)
        seconds *= 0.5 if ended else 1.6
    raise AssertionError("no completion was in flight at any of the syncs")


def endless(tokens: int, *, version: int) -> Any:
    """A group large enough that some members are in flight at the sync, hot enough to stop at random."""
    return request(tokens=tokens, temperature=50.0, group_size=32, version=version)
