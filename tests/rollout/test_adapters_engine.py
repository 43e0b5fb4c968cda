"""A real SGLang server that serves adapters: log-probabilities, loads and unloads beside requests, refusals."""

import asyncio
import json
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from app.errors import EngineError
from app.rollout.remote import RemoteEngine
from app.types import Completion, EngineMemory, FinishReason, InFlight
from app.weight_sync.buckets import Bucket, TensorMeta
from app.weight_sync.transport.ipc_payload import allocate_shared, serialize_bucket
from tests.rollout.adapters import adapter_engine, body_of, logprobs_differ, merged, tensors_of
from tests.rollout.support import HOT, _address_and_key, in_flight, request, without_end

MOST = 4  # adapters
ROUNDING = 5e-5


@pytest.fixture(scope="module")
def engine(ray_session: None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteEngine]:
    """One server of the tiny model. Tests leave it idle; its first request comes before its first adapter."""
    folder = tmp_path_factory.mktemp("adapters")
    started = adapter_engine(without_end(tiny_model, folder), folder, name="engine 0", most=MOST)
    asyncio.run(started.start(300))
    with pytest.raises(EngineError, match="engine 0 has no adapter"):
        asyncio.run(started.generate(request()))
    yield started
    asyncio.run(started.stop())


@pytest.fixture(scope="module")
def bodies(tiny_model: Path) -> dict[int, dict[str, Any]]:
    """Bodies of `load_adapter` by version, which is the seed of the adapter."""
    return {version: body_of(tensors_of(tiny_model, version)) for version in range(1, 7)}


def versions(completions: list[Completion]) -> set[int]:
    return {span.version for completion in completions for span in completion.spans}


async def served(engine: RemoteEngine) -> list[int]:
    """The versions of the adapters that the server itself lists."""
    url, key = await engine.actor.__ray_call__.remote(_address_and_key)
    call = urllib.request.Request(url + "/v1/models", headers={"Authorization": f"Bearer {key}"})

    def names() -> list[str]:
        with urllib.request.urlopen(call, timeout=60) as reply:
            return [model["id"] for model in json.load(reply)["data"] if model.get("parent")]

    return sorted(int(name.split("-")[1].removeprefix("v")) for name in await asyncio.to_thread(names))


async def serves(engine: RemoteEngine, expected: list[int]) -> None:
    """Wait until the server lists these versions."""
    async with asyncio.timeout(60):
        while await served(engine) != expected:  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.05)


def long(version: int) -> Any:
    return request(f"a/{version}@0", group_size=4, temperature=HOT, max_tokens=400)


def test_versions_in_one_batch_have_the_logprobs_of_their_merged_models(
    engine: RemoteEngine, bodies: Mapping[int, Any], tiny_model: Path
) -> None:
    async def run() -> dict[int, list[Completion]]:
        await engine.load_adapter(1, bodies[1])
        first = await in_flight(engine, long(1), running=4)
        await engine.load_adapter(2, bodies[2])
        second = await in_flight(engine, long(2), running=5)
        return {1: await first, 2: await second}

    completions = asyncio.run(run())
    for version, other in ((1, 2), (2, 1)):
        assert versions(completions[version]) == {version}
        assert logprobs_differ(merged(tiny_model, version), long(version), completions[version]) < ROUNDING
        assert logprobs_differ(merged(tiny_model, other), long(version), completions[version]) > 0.01
        assert logprobs_differ(merged(tiny_model, None), long(version), completions[version]) > 0.01


def test_a_version_that_comes_again_is_another_adapter(
    engine: RemoteEngine, bodies: Mapping[int, Any], tiny_model: Path
) -> None:
    """As after a restored checkpoint."""

    async def run() -> list[Completion]:
        await engine.load_adapter(1, bodies[1])
        assert await engine.load_adapter(1, bodies[3]) == 1
        assert await served(engine) == [1]
        return await engine.generate(request())

    completions = asyncio.run(run())
    assert versions(completions) == {1}
    assert logprobs_differ(merged(tiny_model, 3), request(), completions) < ROUNDING


def test_a_payload_of_shared_memory_is_loaded(engine: RemoteEngine, bodies: Any, tiny_model: Path) -> None:
    tensors = tensors_of(tiny_model, 4)
    bucket = Bucket(tuple(TensorMeta(name, "float32", tuple(each.shape)) for name, each in tensors.items()))
    buffer = allocate_shared(bucket.bytes, torch.device("cpu"))
    for start, tensor in zip(bucket.offsets, tensors.values(), strict=True):
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        buffer[start : start + len(flat)] = flat
    payload = {"serialized_named_tensors": [serialize_bucket(buffer, bucket)], "load_format": "flattened_bucket"}

    async def run() -> list[Completion]:
        await engine.load_adapter(4, {**bodies[4], **payload})
        return await engine.generate(request())

    assert logprobs_differ(merged(tiny_model, 4), request(), asyncio.run(run())) < ROUNDING


def test_the_adapters_of_requests_in_flight_stay_and_all_others_go(
    engine: RemoteEngine, bodies: Mapping[int, Any], tiny_model: Path
) -> None:
    async def run() -> list[Completion]:
        await engine.load_adapter(1, bodies[1])
        task = await in_flight(engine, request("old/0@0", group_size=4, temperature=HOT, max_tokens=2000), running=4)
        loaded = [await engine.load_adapter(version, bodies[2 + version % 4]) for version in range(2, 32)]
        assert not task.done()
        assert loaded == [2] * 30
        assert await served(engine) == [1, 31]
        await engine.abort(["old/0@0"])
        completions = await task
        await serves(engine, [31])
        return completions

    completions = asyncio.run(run())
    assert {each.finish_reason for each in completions} == {FinishReason.abort}
    assert versions(completions) == {1}
    assert min(len(each.token_ids) for each in completions) > 0
    given = request("old/0@0", temperature=HOT)
    assert logprobs_differ(merged(tiny_model, 1), given, completions) < ROUNDING


def test_requests_of_the_oldest_adapter_are_aborted_when_no_more_fit(
    engine: RemoteEngine, bodies: Mapping[int, Any], tiny_model: Path
) -> None:
    async def run() -> dict[int, list[Completion]]:
        tasks = {}
        for version in range(1, MOST + 1):
            await engine.load_adapter(version, bodies[version])
            given = request(f"a/{version}@0", group_size=2, temperature=HOT, max_tokens=1000)
            tasks[version] = await in_flight(engine, given, running=2 * version - 1)

        assert await served(engine) == [1, 2, 3, 4]
        assert await engine.load_adapter(5, bodies[5]) == MOST
        assert await served(engine) == [2, 3, 4, 5]
        assert tasks[1].done()
        assert not tasks[2].done()
        await engine.abort(["a/2@0"])
        return {version: await task for version, task in tasks.items()}

    completions = asyncio.run(run())
    reasons = {version: {each.finish_reason for each in group} for version, group in completions.items()}
    assert reasons[1] == reasons[2] == {FinishReason.abort}
    assert FinishReason.abort not in reasons[3] | reasons[4]
    for version in (3, 4):
        given = request(temperature=HOT)
        assert versions(completions[version]) == {version}
        assert logprobs_differ(merged(tiny_model, version), given, completions[version]) < ROUNDING


@pytest.mark.parametrize("mode", InFlight)
def test_an_adapter_is_loaded_while_paused_and_the_old_one_goes_afterwards(
    mode: InFlight, engine: RemoteEngine, bodies: Mapping[int, Any], tiny_model: Path
) -> None:
    """SGLang answers no unload of an adapter in use while it is paused."""

    async def run() -> dict[int, list[Completion]]:
        await engine.load_adapter(1, bodies[1])
        old = await in_flight(engine, long(1), running=4)
        await engine.pause(mode)
        assert await engine.load_adapter(2, bodies[2]) == 2
        assert await served(engine) == [1, 2]
        new = asyncio.create_task(engine.generate(long(2)))
        await engine.resume()
        completions = {1: await old, 2: await new}
        await serves(engine, [2])
        return completions

    completions = asyncio.run(asyncio.wait_for(run(), 120))
    for version in (1, 2):
        assert versions(completions[version]) == {version}
        assert logprobs_differ(merged(tiny_model, version), long(version), completions[version]) < ROUNDING


def test_a_prefix_is_reused_under_its_own_adapter_only(engine: RemoteEngine, bodies: Mapping[int, Any]) -> None:
    tokens = tuple(range(5, 45))

    async def run() -> list[int]:
        cached = []
        for load in (1, None, 2):
            if load is not None:
                await engine.load_adapter(load, bodies[load])
            completions = await engine.generate(request(group_size=1, max_tokens=4, tokens=tokens))
            cached.append(completions[0].cached_tokens)
        return cached

    assert asyncio.run(run()) == [0, len(tokens) - 1, 0]


def folder_of(tensors: Mapping[str, torch.Tensor], folder: Path) -> Path:
    """An adapter as PEFT writes it."""
    (folder / "adapter_config.json").write_text(json.dumps(body_of({})["config_dict"]))
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    return folder


def test_a_failed_load_leaves_the_adapter_before_it_in_force(
    engine: RemoteEngine, bodies: Mapping[int, Any], tiny_model: Path, tmp_path: Path
) -> None:
    tensors = tensors_of(tiny_model, 2)
    strange = {**tensors, "base_model.model.model.layers.0.self_attn.r_proj.lora_A.weight": torch.zeros(4, 64)}

    async def run() -> list[Completion]:
        await engine.load_adapter(1, bodies[1])
        for body, reason in (
            (body_of(tensors, rank=8), "with rank 8 is incompatible"),
            (body_of(strange), r"r_proj\.lora_A\.weight belongs to no layer"),
        ):
            with pytest.raises(EngineError, match=rf"^engine 0: /load_lora_adapter_from_tensors .*{reason}"):
                await engine.load_adapter(2, body)
        with pytest.raises(EngineError, match=r"/load_lora_adapter .*r_proj\.lora_A\.weight"):
            await engine.load_adapter(2, {"lora_path": str(folder_of(strange, tmp_path))})
        assert await served(engine) == [1]
        completions = await engine.generate(request())
        assert await engine.load_adapter(2, bodies[2]) == 1
        return completions

    completions = asyncio.run(run())
    assert versions(completions) == {1}
    assert logprobs_differ(merged(tiny_model, 1), request(), completions) < ROUNDING


def test_the_weights_of_a_model_with_adapters_are_not_released(engine: RemoteEngine, bodies: Mapping[int, Any]) -> None:
    async def run() -> None:
        await engine.load_adapter(1, bodies[1])
        await engine.pause(InFlight.drain)
        await engine.release(EngineMemory.kv_cache)
        with pytest.raises(EngineError, match="engine 0: weights"):
            await engine.release(EngineMemory.weights)
        await engine.reload(EngineMemory.kv_cache)
        await engine.resume()

    asyncio.run(run())
