"""Adapters on two ranks, of the second model family, and on servers of `rollout.urls`."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.cluster.actors import cores_of_ranks
from app.errors import EngineError
from app.rollout.engine.remote import RemoteEngine
from app.types import Completion, InFlight
from tests.rollout.adapters import adapter_engine, body_of, logprobs_differ, merged, tensors_of
from tests.rollout.support import HOT, address_of, host_spec, in_flight, remote, request

pytestmark = pytest.mark.slow
ROUNDING = 5e-5


def long(version: int) -> Any:
    return request(f"a/{version}@0", group_size=4, temperature=HOT, max_tokens=200)


async def two_versions(engine: RemoteEngine, bodies: dict[int, Any]) -> dict[int, list[Completion]]:
    """Groups of two versions in the same batches; the first one is retracted once."""
    await engine.load_adapter(1, bodies[1])
    first = await in_flight(engine, long(1))
    assert await engine.load_adapter(2, bodies[2]) == 2
    second = await in_flight(engine, long(2), running=5)
    await engine.pause(InFlight.retract)
    await engine.resume()
    return {1: await first, 2: await second}


async def test_two_ranks_serve_an_adapter_as_one(ray_session: None, tiny_model: Path, tmp_path: Path) -> None:
    bind = {"SGLANG_CPU_OMP_THREADS_BIND": cores_of_ranks(os.cpu_count() or 1, 2)}
    engine = adapter_engine(tiny_model, tmp_path, name="engine of two", environment=bind, tp_size=2)
    bodies = {version: body_of(tensors_of(tiny_model, version), ranks=2) for version in (1, 2)}

    await engine.start(300)
    try:
        completions = await two_versions(engine, bodies)
    finally:
        await engine.stop()
    for version, other in ((1, 2), (2, 1)):
        assert {span.version for each in completions[version] for span in each.spans} == {version}
        assert logprobs_differ(merged(tiny_model, version), long(version), completions[version]) < ROUNDING
        assert logprobs_differ(merged(tiny_model, other), long(version), completions[version]) > 0.01


async def test_a_running_server_serves_adapters_of_several_hosts(
    ray_session: None, tiny_model: Path, tmp_path: Path
) -> None:
    """As after a restart of the driver: the adapters of the host before it are still there."""
    bodies = {version: body_of(tensors_of(tiny_model, version)) for version in (1, 2)}
    own = adapter_engine(tiny_model, tmp_path, name="engine 0", most=2)

    await own.start(300)
    try:
        await own.load_adapter(1, bodies[1])
        url, key = await address_of(own)
        other = remote(replace(host_spec(tmp_path, name="engine 1", url=url, key=key), serves_adapters=True))
        await other.start(60)
        with pytest.raises(EngineError, match="engine 1 has no adapter"):
            await other.generate(long(1))
        for version in (1, 2, 1, 2):
            assert await other.load_adapter(version, bodies[version]) == 1
        completions = await other.generate(long(2))
    finally:
        await own.stop()
    assert logprobs_differ(merged(tiny_model, 2), long(2), completions) < ROUNDING
