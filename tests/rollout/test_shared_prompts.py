"""The members of a group share one computation of their prompt, and get the log-probabilities of their own tokens."""

import asyncio
import re
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from app.rollout.engine.remote import RemoteEngine
from app.rollout.engine.sglang_plugin import patches
from tests.conftest import make_engine
from tests.rollout.support import HOT, largest_difference, request

MEMBERS, PROMPT_TOKENS = 6, 40
PROMPT = list(range(PROMPT_TOKENS))
PREFILL = re.compile(r"Prefill batch, #new-seq: (\d+), #new-token: (\d+), #cached-token: (\d+)")


def prefills(log: Path) -> list[tuple[int, ...]]:
    """Sequences, new tokens and cached tokens of each prefill in a server's log."""
    return [tuple(map(int, found)) for found in PREFILL.findall(log.read_text())]


async def assert_each_prompt_is_computed_once(engine: RemoteEngine, model: Path) -> None:
    random = np.random.default_rng(0)
    prompts = [tuple(int(token) for token in random.integers(4, 100, PROMPT_TOKENS)) for _ in range(2)]
    requests = [
        request(f"shared/{index}@0", group_size=MEMBERS, temperature=HOT, max_tokens=8, tokens=prompt)
        for index, prompt in enumerate(prompts)
    ]
    log: Path = await engine.actor.__ray_call__.remote(lambda host: host.spec.server.log)
    before = len(prefills(log))
    groups = await asyncio.gather(*(engine.generate(each) for each in requests))
    new = prefills(log)[before:]
    assert sum(sequences for sequences, _, _ in new) == 2 * MEMBERS
    # Of each group one member computes all tokens, the others the last one.
    assert sum(tokens for _, tokens, _ in new) == 2 * (PROMPT_TOKENS + MEMBERS - 1)
    assert largest_difference(model, requests, groups) < 1e-4


async def test_a_groups_prompt_is_computed_once(engine: RemoteEngine, tiny_model: Path) -> None:
    await assert_each_prompt_is_computed_once(engine, tiny_model)


async def test_a_groups_prompt_is_computed_once_with_the_overlap_scheduler_of_accelerators(
    ray_session: None, tiny_model: Path, tmp_path: Path
) -> None:
    """A prompt is in the prefix cache a batch later there."""
    engine = make_engine(tiny_model, tmp_path, name="engine that overlaps", disable_overlap_schedule=False)
    await engine.start(300)
    try:
        await assert_each_prompt_is_computed_once(engine, tiny_model)
    finally:
        await engine.end()


class Request:
    def __init__(self, prompt: list[int] = PROMPT, cached: int = 0, sampled: int = 0):
        self.origin_input_ids = list(prompt)
        self.prefix_len = cached
        self.output_ids = [0] * sampled


def adder(*running: Request, **changed: Any) -> SimpleNamespace:
    plain = {"tree_cache": cache(), "preempt_list": [], "can_run_list": list(running)}
    return SimpleNamespace(**{**plain, **changed})


def cache(*, disable: bool = False, recurrent: bool = False) -> SimpleNamespace:
    return SimpleNamespace(disable=disable, supports_mamba=lambda: recurrent)


def test_a_request_waits_for_its_own_prompt_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def waits(prefill: SimpleNamespace, request: Request) -> bool:
        monkeypatch.setattr(patches, "_adders", deque(maxlen=2))
        return patches.waits(prefill, request)

    assert waits(adder(Request()), Request())
    assert not waits(adder(), Request())
    assert not waits(adder(Request()), Request([*PROMPT[:-1], 7]))
    assert not waits(adder(Request()), Request(cached=39))
    assert not waits(adder(Request(sampled=3)), Request())  # its prompt is in the cache, or was retracted
    assert not waits(adder(Request(), tree_cache=cache(disable=True)), Request())
    assert not waits(adder(Request(), tree_cache=cache(recurrent=True)), Request())
    assert not waits(adder(Request(), preempt_list=[Request()]), Request())


def test_a_request_waits_until_the_prompt_is_computed_or_given_up() -> None:
    first, second, added = Request(), Request(), []
    for prefill, given in (
        *((adder(first), second), (adder(first), second), (adder(), second)),  # two chunks, and the overlapped batch
        *((adder(), second), (adder(second), first)),  # the first was aborted: it never got a token
    ):
        patches.add_one_req(lambda _, req: added.append(req), prefill, given)
    assert added == [second]
