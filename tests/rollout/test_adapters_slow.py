"""Adapters on two ranks, of the second model family, and on servers of `rollout.urls`."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.cluster.actors import cores_of_ranks
from app.errors import EngineError
from app.rollout.remote import RemoteEngine
from app.types import Completion, InFlight
from tests.rollout.adapters import adapter_engine, body_of, logprobs_differ, merged, tensors_of
from tests.rollout.support import HOT, _address_and_key, host_spec, in_flight, remote, request
from tests.rollout.test_qwen35 import ROUNDING as QWEN35_ROUNDING
from tests.tiny_models.make import Recipe

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


def assert_logprobs(model: Path, completions: dict[int, list[Completion]], rounding: float) -> None:
    for version, other in ((1, 2), (2, 1)):
        spans = {span.version for each in completions[version] for span in each.spans}
        assert spans == {version}
        assert logprobs_differ(merged(model, version), long(version), completions[version]) < rounding
        assert logprobs_differ(merged(model, other), long(version), completions[version]) > 0.01


def test_two_ranks_serve_an_adapter_as_one(ray_session: None, tiny_model: Path, tmp_path: Path) -> None:
    bind = {"SGLANG_CPU_OMP_THREADS_BIND": cores_of_ranks(os.cpu_count() or 1, 2)}
    engine = adapter_engine(tiny_model, tmp_path, name="engine of two", environment=bind, tp_size=2)
    bodies = {version: body_of(tensors_of(tiny_model, version), ranks=2) for version in (1, 2)}

    async def run() -> dict[int, list[Completion]]:
        await engine.start(300)
        try:
            return await two_versions(engine, bodies)
        finally:
            await engine.stop()

    assert_logprobs(tiny_model, asyncio.run(run()), ROUNDING)


def test_qwen35_serves_adapters_of_its_linear_attention_too(
    ray_session: None, tmp_path: Path, made_model: Callable[..., Path]
) -> None:
    model = made_model(Recipe(qwen35=True, layers=4), warmed_up=False)
    engine = adapter_engine(model, tmp_path, name="engine of qwen35", disable_radix_cache=True)
    tensors = {version: tensors_of(model, version) for version in (1, 2)}
    layers = {name.split(".")[-3] for name in tensors[1]}
    assert {"in_proj_q", "in_proj_z", "out_proj", "q_proj", "down_proj"} <= layers

    async def run() -> dict[int, list[Completion]]:
        await engine.start(300)
        try:
            return await two_versions(engine, {version: body_of(each) for version, each in tensors.items()})
        finally:
            await engine.stop()

    assert_logprobs(model, asyncio.run(run()), QWEN35_ROUNDING)


def test_a_running_server_serves_adapters_of_several_hosts(ray_session: None, tiny_model: Path, tmp_path: Path) -> None:
    """As after a restart of the driver: the adapters of the host before it are still there."""
    bodies = {version: body_of(tensors_of(tiny_model, version)) for version in (1, 2)}
    own = adapter_engine(tiny_model, tmp_path, name="engine 0", most=2)

    async def run() -> list[Completion]:
        await own.start(300)
        try:
            await own.load_adapter(1, bodies[1])
            url, key = await own.actor.__ray_call__.remote(_address_and_key)
            spec = host_spec(tmp_path, name="engine 1", url=url, key=key)
            other = remote(replace(spec, serves_adapters=True))
            await other.start(60)
            with pytest.raises(EngineError, match="engine 1 has no adapter"):
                await other.generate(long(1))
            for version in (1, 2, 1, 2):
                assert await other.load_adapter(version, bodies[version]) == 1
            return await other.generate(long(2))
        finally:
            await own.stop()

    assert logprobs_differ(merged(tiny_model, 2), long(2), asyncio.run(run())) < ROUNDING
