"""A real SGLang server that serves adapters: log-probabilities, loads and unloads beside requests, refusals."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.errors import EngineError
from app.rollout.remote import RemoteEngine
from app.types import Completion
from tests.rollout.adapters import adapter_engine, body_of, logprobs_differ, merged, tensors_of
from tests.rollout.support import HOT, in_flight, request

MOST = 4  # adapters
ROUNDING = 1e-5


@pytest.fixture(scope="module")
def engine(ray_session: None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteEngine]:
    """One server of the tiny model. Tests leave it idle; its first request comes before its first adapter."""
    started = adapter_engine(tiny_model, tmp_path_factory.mktemp("adapters"), name="engine 0", most=MOST)
    asyncio.run(started.start(300))
    with pytest.raises(EngineError, match="engine 0 has no adapter yet: the first weight sync loads one"):
        asyncio.run(started.generate(request()))
    yield started
    asyncio.run(started.stop())


@pytest.fixture(scope="module")
def bodies(tiny_model: Path) -> dict[int, dict[str, Any]]:
    """Bodies of `load_adapter` by version, which is the seed of the adapter."""
    return {version: body_of(tensors_of(tiny_model, version)) for version in (1, 2, 3)}


def versions(completions: list[Completion]) -> set[int]:
    return {span.version for completion in completions for span in completion.spans}


def test_versions_in_one_batch_have_the_logprobs_of_their_merged_models(
    engine: RemoteEngine, bodies: Any, tiny_model: Path
) -> None:
    given = {version: request(f"a/{version}@0", group_size=4, temperature=HOT, max_tokens=200) for version in (1, 2)}

    async def run() -> dict[int, list[Completion]]:
        await engine.load_adapter(1, bodies[1])
        first = await in_flight(engine, given[1], running=4)
        await engine.load_adapter(2, bodies[2])
        second = await in_flight(engine, given[2], running=5)
        return {1: await first, 2: await second}

    completions = asyncio.run(run())
    for version, other in ((1, 2), (2, 1)):
        assert versions(completions[version]) == {version}
        assert logprobs_differ(merged(tiny_model, version), given[version], completions[version]) < ROUNDING
        assert logprobs_differ(merged(tiny_model, other), given[version], completions[version]) > 0.01
        assert logprobs_differ(merged(tiny_model, None), given[version], completions[version]) > 0.01
