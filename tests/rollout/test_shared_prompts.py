"""The members of a group share one computation of their prompt, and get the log-probabilities of their own tokens."""

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from app.rollout.engine.remote import RemoteEngine
from app.rollout.engine.sglang_plugin import patches
from tests.rollout.support import HOT, largest_difference, request

MEMBERS, PROMPT_TOKENS = 6, 40
PREFILL = re.compile(r"Prefill batch, #new-seq: (\d+), #new-token: (\d+), #cached-token: (\d+)")


def prefills(log: Path) -> list[tuple[int, ...]]:
    """Sequences, new tokens and cached tokens of each prefill in a server's log."""
    return [tuple(map(int, found)) for found in PREFILL.findall(log.read_text())]


async def test_a_groups_prompt_is_computed_once(engine: RemoteEngine, tiny_model: Path) -> None:
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
    assert largest_difference(tiny_model, requests, groups) < 1e-4


def adder(*running: Any, **changed: Any) -> SimpleNamespace:
    plain = {"tree_cache": SimpleNamespace(disable=False), "rem_mamba_slots": None, "can_run_list": list(running)}
    return SimpleNamespace(**{**plain, **changed})


class Request:
    def __init__(self, prompt: list[int], cached: int = 0):
        self.origin_input_ids = prompt
        self.prefix_len = cached


def test_a_request_waits_once_and_only_for_its_own_prompt() -> None:
    prompt = list(range(40))
    first = Request(prompt)
    assert patches.waits(adder(first), Request(list(prompt)))
    assert not patches.waits(adder(), Request(prompt))
    assert not patches.waits(adder(first), Request([*prompt[:-1], 7]))
    assert not patches.waits(adder(first), Request(list(prompt), cached=39))
    assert not patches.waits(adder(first, tree_cache=SimpleNamespace(disable=True)), Request(list(prompt)))
    assert not patches.waits(adder(first, rem_mamba_slots=3), Request(list(prompt)))

    waiting = Request(list(prompt))
    added: list[Any] = []

    def original(adder: Any, req: Any, *_: Any) -> str:
        added.append(req)
        return "added"

    patches.add_one_req(original, adder(first), waiting, False, None)
    assert added == []
    assert patches.add_one_req(original, adder(first), waiting, False, None) == "added"
    assert added == [waiting]
