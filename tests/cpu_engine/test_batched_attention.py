"""The engine's batched attention: requests of any length that come and go see their own tokens and no others."""

import asyncio
from pathlib import Path

import numpy as np

from app.rollout.engine.remote import RemoteEngine
from app.types import Completion, GroupRequest
from tests.rollout.support import HOT, largest_difference, request


def ragged(count: int) -> list[GroupRequest]:
    """Prompts of 1 to 200 tokens, limits of 1 to 120; in half of the groups the prompts share a beginning."""
    random = np.random.default_rng(0)
    shared = random.integers(4, 100, 200)
    requests = []
    for index in range(count):
        tokens = shared if index % 2 else random.integers(4, 100, 200)
        requests.append(
            request(
                f"ragged/{index}@0",
                group_size=4,
                temperature=HOT,
                max_tokens=int(random.integers(1, 121)),
                tokens=tuple(int(token) for token in tokens[: random.integers(1, 201)]),
            )
        )
    return requests


async def staggered(engine: RemoteEngine, requests: list[GroupRequest]) -> list[list[Completion]]:
    """Start each one while those before it are being sampled."""
    running = []
    for given in requests:
        running.append(asyncio.create_task(engine.generate(given)))
        await asyncio.sleep(0.05)
    return await asyncio.gather(*running)


def test_requests_that_come_and_go_have_the_logprobs_of_transformers(engine: RemoteEngine, tiny_model: Path) -> None:
    requests = ragged(16)
    groups = asyncio.run(staggered(engine, requests))
    lengths = {len(completion.token_ids) for group in groups for completion in group}
    assert len(lengths) > 15
    assert largest_difference(tiny_model, requests, groups) < 1e-4
