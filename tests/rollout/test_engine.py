"""A real SGLang server behind its host: groups, log-probabilities, pauses, aborts."""

import asyncio
import time
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from app.errors import EngineError
from app.rollout.engine.remote import RemoteEngine
from app.types import Completion, FinishReason, GroupRequest, InFlight
from tests.conftest import make_engine
from tests.rollout.support import HOT, in_flight, largest_difference, noisy_model, request, without_end
from tests.tiny_models.tokenizer import CHARACTERS, END, SPECIAL

LONG = 1800  # tokens: an engine samples them for seconds, so a group of them does not end between two calls


@pytest.fixture(scope="module")
def endless(ray_session: None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteEngine]:
    """An engine whose completions end at their token limit only. Tests leave it idle and running."""
    folder = tmp_path_factory.mktemp("endless")
    started = make_engine(without_end(tiny_model, folder), folder, name="engine 1")
    asyncio.run(started.start(300))
    yield started
    asyncio.run(started.end())


def assert_whole(completions: list[Completion], given: GroupRequest) -> None:
    assert len(completions) == given.group_size
    for completion in completions:
        assert len(completion.token_ids) == len(completion.logprobs) <= given.sampling.max_tokens
        assert completion.token_ids.dtype == np.int32
        assert completion.logprobs.dtype == np.float32
        assert np.isfinite(completion.logprobs).all()
        assert (completion.logprobs <= 0).all()
        ends = [0, *(span.end for span in completion.spans)]
        assert [span.start for span in completion.spans] == ends[:-1]
        assert ends[-1] == len(completion.token_ids)


@pytest.mark.parametrize("temperature", [1.0, 0.7, HOT])
def test_sampled_logprobs_are_those_of_transformers_at_the_temperature(
    temperature: float, engine: RemoteEngine, tiny_model: Path
) -> None:
    given = request(group_size=16, temperature=temperature, max_tokens=24)
    completions = asyncio.run(engine.generate(given))
    assert_whole(completions, given)
    assert len({completion.token_ids.tobytes() for completion in completions}) > 1
    assert {completion.finish_reason for completion in completions} <= {FinishReason.stop, FinishReason.length}
    for completion in completions:
        full = len(completion.token_ids) == given.sampling.max_tokens
        assert full or completion.finish_reason is FinishReason.stop
    assert largest_difference(tiny_model, [given], [completions]) < 1e-4


@pytest.mark.parametrize(("cut", "ranks"), [({"top_k": 2}, {0, 1}), ({"top_p": 0.01}, {0})])
def test_a_cut_changes_what_is_sampled_and_not_the_logprobs_that_are_reported(
    cut: dict[str, Any], ranks: set[int], engine: RemoteEngine, tiny_model: Path
) -> None:
    given = request(group_size=8, temperature=2.0, max_tokens=24)
    given = replace(given, sampling=replace(given.sampling, **cut))
    completions = asyncio.run(engine.generate(given))

    policy, prompt = noisy_model(tiny_model, 0), len(given.token_ids)
    sampled: set[int] = set()  # of each sampled token, how many are likelier by transformers
    for completion in completions:
        tokens = torch.as_tensor(np.concatenate([given.token_ids, completion.token_ids]), dtype=torch.int64)
        with torch.no_grad():
            logits = policy(input_ids=tokens[None]).logits[0, prompt - 1 : -1]
        sampled |= set((logits > logits.gather(1, tokens[prompt:, None])).sum(1).tolist())
    assert sampled == ranks
    # Those of the whole distribution: why training refuses a cut.
    assert largest_difference(tiny_model, [given], [completions]) < 1e-4


async def test_a_completion_ends_with_its_stop_string_whose_tokens_have_logprobs(
    ray_session: None, tiny_model: Path, tmp_path: Path
) -> None:
    given = request(group_size=16, temperature=HOT, max_tokens=LONG)
    given = replace(given, sampling=replace(given.sampling, stop=("7", "12")))

    started = make_engine(tiny_model, tmp_path, name="engine 2", skip_tokenizer_init=False)
    await started.start(300)
    try:
        completions = await started.generate(given)
    finally:
        await started.end()
    assert_whole(completions, given)
    assert {completion.finish_reason for completion in completions} == {FinishReason.stop}
    vocabulary = (*SPECIAL, *CHARACTERS)
    texts = ["".join(vocabulary[token] for token in completion.token_ids) for completion in completions]
    assert all(text.endswith(("7", "12", END)) for text in texts)
    assert sum(not text.endswith(END) for text in texts) > 4
    assert not any(stop in text[:-1] for text in texts for stop in ("7", "12"))
    assert largest_difference(tiny_model, [given], [completions]) < 1e-4


async def test_a_prompt_in_flight_is_refused_and_abort_ends_its_group_and_no_other(endless: RemoteEngine) -> None:
    first = await in_flight(endless, request("a/1@0", group_size=3, temperature=HOT, max_tokens=LONG))
    given = request("a/2@0", group_size=3, temperature=HOT, max_tokens=900)
    second = await in_flight(endless, given, running=4)  # at least one of them
    assert (await endless.stats()).groups == 2
    with pytest.raises(EngineError, match="engine 1: prompt a/1@0"):
        await endless.generate(request("a/1@0"))
    await endless.abort(["a/1@0", "not/there@0"])
    aborted, finished = await first, await second
    assert {completion.finish_reason for completion in aborted} == {FinishReason.abort}
    assert max(len(completion.token_ids) for completion in aborted) > 0
    assert all(len(completion.token_ids) == len(completion.logprobs) < LONG for completion in aborted)
    assert [len(completion.token_ids) for completion in finished] == [900] * 3


async def test_a_paused_engine_leaves_the_cores_to_others_and_wakes_at_once(endless: RemoteEngine) -> None:
    """SGLang's own loop would take a whole core while the trainer trains."""
    task = await in_flight(endless, request(group_size=4, temperature=HOT, max_tokens=LONG))
    await endless.pause(InFlight.retract)
    try:
        assert not task.done()
        busy = scheduler_seconds()
        await asyncio.sleep(2.0)
        busy = scheduler_seconds() - busy
    finally:  # the engine is this module's
        wake_seconds = [await timed(endless.resume())]

    for _ in range(2):
        await endless.pause(InFlight.retract)
        wake_seconds.append(await timed(endless.resume()))
    await endless.abort()
    await asyncio.wait_for(task, 60)
    assert busy < 0.5
    assert sorted(wake_seconds)[1] < 0.5  # the median: other processes may take the cores meanwhile


async def timed(call: Coroutine[Any, Any, None]) -> float:
    """The seconds that a call takes."""
    started = time.perf_counter()
    await call
    return time.perf_counter() - started


def scheduler_seconds() -> float:
    """CPU time of the schedulers of this session's engines."""
    psutil.process_iter.cache_clear()
    schedulers = [
        each for each in psutil.Process().children(recursive=True) if "sglang::scheduler" in " ".join(each.cmdline())
    ]
    assert schedulers
    return sum(sum(each.cpu_times()[:2]) for each in schedulers)


async def test_drain_waits_for_what_is_in_flight_and_holds_what_comes_after(endless: RemoteEngine) -> None:
    task = await in_flight(endless, request(group_size=4, temperature=HOT, max_tokens=900))
    await endless.pause(InFlight.drain)
    assert (await endless.stats()).groups == 0
    completions = await asyncio.wait_for(task, 60)
    assert not any(completion.finish_reason is FinishReason.abort for completion in completions)

    later = asyncio.create_task(endless.generate(request("later/0@0")))
    await asyncio.sleep(0.5)
    assert not later.done()
    assert (await endless.stats()).groups == 0
    await endless.resume()
    assert len(await asyncio.wait_for(later, 60)) == 4
