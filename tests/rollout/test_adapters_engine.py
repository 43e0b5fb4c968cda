"""A real SGLang server that serves adapters: log-probabilities, loads and unloads beside requests, refusals."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from app.errors import EngineError
from app.rollout.engine.remote import RemoteEngine
from app.types import Completion, EngineMemory, FinishReason, InFlight
from tests.rollout.adapters import body_of, logprobs_differ, merged, tensors_of
from tests.rollout.support import HOT, address_of, in_flight, reply_of, request

ROUNDING = 5e-5


@pytest.fixture
def engine(engine_with_adapters: RemoteEngine) -> RemoteEngine:
    return engine_with_adapters


@pytest.fixture(scope="module")
def bodies(tiny_model: Path) -> dict[int, dict[str, Any]]:
    """Bodies of `load_adapter` by version, which is the seed of the adapter."""
    return {version: body_of(tensors_of(tiny_model, version)) for version in range(1, 7)}


def versions(completions: list[Completion]) -> set[int]:
    return {span.version for completion in completions for span in completion.spans}


async def served(engine: RemoteEngine) -> list[int]:
    """The versions of the adapters that the server itself lists."""
    url, key = await address_of(engine)
    models = (await asyncio.to_thread(reply_of, url + "/v1/models", key))["data"]
    return sorted(int(model["id"].split("-")[1].removeprefix("v")) for model in models if model.get("parent"))


async def serves(engine: RemoteEngine, expected: list[int]) -> None:
    """Wait until the server lists these versions."""
    async with asyncio.timeout(60):
        while await served(engine) != expected:  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.05)


def long(version: int) -> Any:
    return request(f"a/{version}@0", group_size=4, temperature=HOT, max_tokens=400)


async def test_the_adapters_of_requests_in_flight_stay_and_all_others_go(
    engine: RemoteEngine, bodies: Mapping[int, Any], tiny_model: Path
) -> None:
    old, of_old = 1, 1
    await engine.load_adapter(old, bodies[of_old])
    for loads in (30, 10, 3, 1):  # fewer where the group ends before so many are loaded
        task = await in_flight(engine, request("old/0@0", group_size=4, temperature=HOT, max_tokens=2000), running=4)
        new = range(old + 1, old + 1 + loads)
        loaded = [await engine.load_adapter(version, bodies[2 + version % 4]) for version in new]
        if not task.done():
            break
        old, of_old = new[-1], 2 + new[-1] % 4

    assert not task.done()
    assert loaded == [2] * loads
    assert await served(engine) == [old, new[-1]]
    await engine.abort(["old/0@0"])
    completions = await task
    await serves(engine, [new[-1]])
    assert {each.finish_reason for each in completions} == {FinishReason.abort}
    assert versions(completions) == {old}
    assert min(len(each.token_ids) for each in completions) > 0
    given = request("old/0@0", temperature=HOT)
    assert logprobs_differ(merged(tiny_model, of_old), given, completions) < ROUNDING


async def test_an_adapter_is_loaded_while_paused_and_the_old_one_goes_afterwards(
    engine: RemoteEngine, bodies: Mapping[int, Any], tiny_model: Path
) -> None:
    """SGLang answers no unload of an adapter in use while it is paused."""
    await engine.load_adapter(1, bodies[1])
    old = await in_flight(engine, long(1), running=4)
    await engine.pause(InFlight.retract)
    async with asyncio.timeout(120):
        assert await engine.load_adapter(2, bodies[2]) == 2
        assert await served(engine) == [1, 2]
        new = asyncio.create_task(engine.generate(long(2)))
        await engine.resume()
        completions = {1: await old, 2: await new}
        await serves(engine, [2])

    for version in (1, 2):
        assert versions(completions[version]) == {version}
        assert logprobs_differ(merged(tiny_model, version), long(version), completions[version]) < ROUNDING


async def test_a_prefix_is_reused_under_its_own_adapter_only(engine: RemoteEngine, bodies: Mapping[int, Any]) -> None:
    tokens = tuple(range(5, 45))

    cached = []
    for load in (1, None, 2):
        if load is not None:
            await engine.load_adapter(load, bodies[load])
        completions = await engine.generate(request(group_size=1, max_tokens=4, tokens=tokens))
        cached.append(completions[0].cached_tokens)
    assert cached == [0, len(tokens) - 1, 0]


async def test_a_failed_load_leaves_the_adapter_before_it_in_force(
    engine: RemoteEngine, bodies: Mapping[int, Any], tiny_model: Path, tmp_path: Path
) -> None:
    tensors = tensors_of(tiny_model, 2)
    strange = {**tensors, "base_model.model.model.layers.0.self_attn.r_proj.lora_A.weight": torch.zeros(4, 64)}

    await engine.load_adapter(1, bodies[1])
    for body, reason in (
        (body_of(tensors, rank=8), "with rank 8 is incompatible"),
        (body_of(strange), r"r_proj\.lora_A\.weight belongs to no layer"),
    ):
        with pytest.raises(EngineError, match=rf"^engine 0: /load_lora_adapter_from_tensors .*{reason}"):
            await engine.load_adapter(2, body)
    (tmp_path / "adapter_config.json").write_text(json.dumps(body_of({})["config_dict"]))  # as PEFT writes it
    save_file(strange, tmp_path / "adapter_model.safetensors")
    with pytest.raises(EngineError, match=r"/load_lora_adapter .*r_proj\.lora_A\.weight"):
        await engine.load_adapter(2, {"lora_path": str(tmp_path)})
    assert await served(engine) == [1]
    completions = await engine.generate(request())
    assert await engine.load_adapter(2, bodies[2]) == 1
    assert versions(completions) == {1}
    assert logprobs_differ(merged(tiny_model, 1), request(), completions) < ROUNDING


async def test_the_weights_of_a_model_with_adapters_are_not_released(
    engine: RemoteEngine, bodies: Mapping[int, Any]
) -> None:
    await engine.load_adapter(1, bodies[1])
    await engine.pause(InFlight.drain)
    await engine.release([EngineMemory.kv_cache])
    with pytest.raises(EngineError, match="engine 0: weights"):
        await engine.release(list(EngineMemory))
    await engine.reload([EngineMemory.kv_cache])
    await engine.resume()
