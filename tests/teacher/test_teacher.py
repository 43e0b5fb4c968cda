"""Log-probabilities of a teacher: those of transformers from the real server, and what its failures become."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web

from app.config.teacher import TeacherConfig
from app.errors import RunError
from app.model.hf_directory import load_tokenizer
from app.teacher import KEY, Teacher, require_teacher
from app.types import Completion, Ending, Episode, FinishReason, Group, Prompt, TokenSequence, Trajectory, VersionSpan
from tests.refusals import refused
from tests.teacher.servers import serving, sglang
from tests.trainer.plain import transformers_model


def one_turn(prompt: list[int], completion: list[int]) -> Trajectory:
    asked = Prompt("mine/0@0", np.array(prompt, np.int32), "", "mine")
    sampled = np.array(completion, np.int32)
    logprobs = np.zeros(len(sampled), np.float32)
    spans = (VersionSpan(0, 0, len(sampled)),)
    return Trajectory(asked, Completion(sampled, logprobs, FinishReason.stop, spans), "")


def several_turns(trajectory: Trajectory) -> Trajectory:
    """Return an episode of two sequences: one of two turns around an observation, and one of a single turn."""
    sampled = np.array([False, False, True, True, False, False, True], bool)
    tokens = np.array([5, 20, 21, 22, 9, 30, 31], np.int32)
    first = TokenSequence(tokens, sampled, np.zeros(3, np.float32), (VersionSpan(0, 0, 3),))
    second = TokenSequence(tokens[:4], sampled[:4], np.zeros(2, np.float32), (VersionSpan(0, 0, 2),))
    return replace(trajectory, episode=Episode((first, second), (), Ending.stop, {}, {}))


def exact(model: Any, sequence: TokenSequence) -> np.ndarray:
    ids = torch.as_tensor(sequence.token_ids, dtype=torch.int64)[None]
    with torch.no_grad():
        logs = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0].double(), dim=-1)
    at = np.flatnonzero(sequence.sampled)
    return np.array([logs[position - 1, sequence.token_ids[position]].item() for position in at])


def group_of(*trajectories: Trajectory) -> Group:
    return Group(trajectories[0].prompt, trajectories)


async def test_a_server_scores_whole_episodes_as_transformers_does(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = transformers_model(tiny_model), load_tokenizer(tiny_model)
    alone = one_turn([22, 23, 16, 24, 34], [25, 26, 2])
    last = model.config.vocab_size - 1  # SGLang reports its id as 0
    group = group_of(alone, several_turns(alone), one_turn([22, 34], []), one_turn([22, 34], [last, last]))

    async with sglang(tiny_model, tmp_path) as server:
        monkeypatch.setenv(KEY, server.key)
        config = TeacherConfig(urls=[server.url])
        async with Teacher(config) as teacher:
            await teacher.require_same_vocabulary(tokenizer)
            scored = await teacher.score(group)

        monkeypatch.setenv(KEY, "wrong")
        started = time.monotonic()
        async with Teacher(config) as teacher:
            with pytest.raises(RunError, match="refused our key"):
                await teacher.score(group)
        assert time.monotonic() - started < 10  # not sent again
        with refused("teacher.urls", server.url):
            await asyncio.to_thread(require_teacher, config, tokenizer)

    for trajectory in scored.trajectories:
        for sequence in trajectory.sequences:
            assert sequence.teacher_logprobs is not None
            np.testing.assert_allclose(sequence.teacher_logprobs, exact(model, sequence), atol=2e-5)
            assert sequence.teacher_logprobs.dtype == np.float32


def entries(count: int, logprob: float = -0.5) -> web.Response:
    numbers = [[None, 0, None], *([logprob, 0, None] for _ in range(count - 1))]
    return web.json_response({"meta_info": {"input_token_logprobs": numbers}})


async def scored_by(handler: Callable[[web.Request], Any], **changes: Any) -> Group:
    async with serving(generate=handler) as url, Teacher(replace(TeacherConfig(urls=[url]), **changes)) as teacher:
        return await teacher.score(group_of(one_turn([1, 2], [3, 4, 5])))


async def test_a_failed_request_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.teacher.RETRY_DELAY_S", 0.01)
    calls = []

    async def third_time(request: web.Request) -> web.Response:
        calls.append(await request.json())
        return entries(4) if len(calls) == 3 else web.json_response({"error": "out of memory"}, status=500)

    scored = await scored_by(third_time)
    assert scored.trajectories[0].completion.teacher_logprobs is not None
    assert scored.trajectories[0].completion.teacher_logprobs.tolist() == [-0.5, -0.5, -0.5]
    assert [call["logprob_start_len"] for call in calls] == [1, 1, 1]
    assert calls[0]["sampling_params"] == {"max_new_tokens": 0, "temperature": 1.0}


async def test_each_data_source_is_scored_by_its_own_teacher() -> None:
    def teacher(logprob: float) -> Callable[[web.Request], Any]:
        async def generate(request: web.Request) -> web.Response:
            return entries(4, logprob)

        return generate

    config = TeacherConfig()
    async with serving(generate=teacher(-0.5)) as one, serving(generate=teacher(-2.0)) as other:
        config.urls = {"sums": [one], "code": [other, other]}
        async with Teacher(config) as teachers:
            scored = [await teachers.score(of_source(each)) for each in ("sums", "code", "sums", "code")]

    found = [group.trajectories[0].completion.teacher_logprobs for group in scored]
    assert [logprobs.tolist() for logprobs in found if logprobs is not None] == [[-0.5] * 3, [-2.0] * 3] * 2


def of_source(source: str) -> Group:
    trajectory = one_turn([1, 2], [3, 4, 5])
    return group_of(replace(trajectory, prompt=replace(trajectory.prompt, source=source)))


@pytest.mark.parametrize("problem", ["late", "refused", "short", "not finite", "gone"])
async def test_failures_end_after_the_retries(problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.teacher.RETRY_DELAY_S", 0.01)
    monkeypatch.setattr("app.teacher.RETRIES", 1)
    calls = 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal calls
        calls += 1
        match problem:
            case "late":
                await asyncio.sleep(30)
            case "short":
                return entries(3)
            case "not finite":
                return web.json_response({"meta_info": {"input_token_logprobs": [[None, 0, None]] * 4}})
            case "gone":
                assert request.transport is not None
                request.transport.close()
        return web.json_response({"error": "no"}, status=400)

    with pytest.raises(RunError) as failure:
        await scored_by(answer, timeout_s=0.3)
    assert calls == 2
    assert "mine/0@0" in str(failure.value)
    assert "2 times" in str(failure.value)
