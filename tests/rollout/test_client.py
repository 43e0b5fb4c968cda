"""The bodies of requests, and how replies and failures are read."""

import asyncio
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest
from aiohttp import web

from app.errors import EngineError
from app.rollout.engine import client as clients
from app.rollout.engine.client import Client, parse, spans, spans_in_place
from app.types import FinishReason, VersionSpan
from tests.rollout.support import host_spec, remote, request
from tests.teacher.servers import Handler, serving


def span(version: str, start: int, end: int) -> dict[str, Any]:
    return {"version": version, "start": start, "end": end}


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        (None, [(4, 0, 10)]),
        ([], [(4, 0, 10)]),
        ([span("5", 0, 10)], [(5, 0, 10)]),
        ([span("4", 0, 3), span("5", 3, 10)], [(4, 0, 3), (5, 3, 10)]),
        ([span("default", 0, 3), span("5", 3, 10)], [(4, 0, 3), (5, 3, 10)]),  # weights that no sync loaded
        ([span("5", 3, 10)], [(4, 0, 10)]),  # a gap: all of it is ignored
        ([span("4", 0, 3), span("5", 4, 10)], [(4, 0, 10)]),
        ([span("5", 0, 9)], [(4, 0, 10)]),
    ],
)
def test_spans_cover_all_tokens_without_gaps(reported: Any, expected: list[tuple[int, int, int]]) -> None:
    assert spans({"weight_versions": reported}, 10, 4) == tuple(VersionSpan(*each) for each in expected)


@pytest.mark.parametrize(
    ("reported", "at_once", "expected"),
    [
        ([(4, 0, 10)], 1, [(4, 0, 10)]),
        ([(4, 0, 3), (5, 3, 10)], 1, [(4, 0, 4), (5, 4, 10)]),
        ([(4, 0, 3), (6, 3, 10)], 1, [(4, 0, 4), (6, 4, 10)]),
        ([(5, 0, 10)], 1, [(4, 0, 1), (5, 1, 10)]),  # no token before the sync
        ([(6, 0, 10)], 1, [(5, 0, 1), (6, 1, 10)]),  # it waited through a sync
        ([(5, 0, 1)], 1, [(4, 0, 1)]),
        ([(4, 0, 9), (5, 9, 10)], 1, [(4, 0, 10)]),
        ([(4, 0, 3), (5, 3, 4), (6, 4, 10)], 1, [(4, 0, 4), (5, 4, 5), (6, 5, 10)]),
        ([(4, 0, 0)], 1, []),
        ([(4, 0, 3), (5, 3, 20)], 4, [(4, 0, 7), (5, 7, 20)]),
        ([(5, 0, 10)], 4, [(4, 0, 4), (5, 4, 10)]),
        ([(4, 0, 3), (5, 3, 6)], 4, [(4, 0, 6)]),
        ([(4, 0, 3), (5, 3, 5), (6, 5, 8)], 4, [(4, 0, 7), (5, 7, 8)]),
    ],
)
def test_the_tokens_that_a_pass_may_yield_after_a_sync_in_place_count_as_the_version_before(
    reported: list[tuple[int, int, int]], at_once: int, expected: list[tuple[int, int, int]]
) -> None:
    """One, and with drafts as many as a pass may accept."""
    counted = spans_in_place([VersionSpan(*each) for each in reported], 4, at_once)
    assert [(each.version, each.start, each.end) for each in counted] == expected


def test_an_answer_says_how_many_passes_verified_its_drafts_and_how_often_it_was_retracted() -> None:
    meta = {"num_retractions": 2, "spec_verify_ct": 5, "spec_num_proposed_drafts": 15, "spec_accept_length": 2.4}
    drafted = asyncio.run(parse({"meta_info": answer([(-1.0, 2)], "stop")["meta_info"] | meta}, 3))
    assert (drafted.completion.verify_passes, drafted.tokens_at_once) == (5, 4)
    plain = asyncio.run(parse(answer([(-1.0, 2)], "stop"), 3))
    assert (plain.completion.verify_passes, plain.tokens_at_once) == (0, 1)
    assert (drafted.completion.retractions, plain.completion.retractions) == (2, 0)


def answer(pairs: list[tuple[float, int]], reason: str | None) -> dict[str, Any]:
    finish = None if reason is None else {"type": reason}
    return {"meta_info": {"output_token_logprobs": [[*pair, None] for pair in pairs], "finish_reason": finish}}


@pytest.mark.parametrize("reason", [*FinishReason, None])
def test_an_answer_becomes_a_completion(reason: FinishReason | None) -> None:
    completion = asyncio.run(parse(answer([(-0.5, 7), (-1.25, 2)], reason and reason.value), 3)).completion
    assert completion.token_ids.dtype == np.int32
    assert completion.token_ids.tolist() == [7, 2]
    assert completion.logprobs.dtype == np.float32
    assert completion.logprobs.tolist() == [-0.5, -1.25]
    assert completion.finish_reason is (reason or FinishReason.abort)
    assert completion.spans == (VersionSpan(3, 0, 2),)


def test_an_answer_without_tokens_is_an_empty_completion() -> None:
    completion = asyncio.run(parse({"meta_info": {"finish_reason": {"type": "abort"}}}, 3)).completion
    assert (len(completion.token_ids), len(completion.logprobs)) == (0, 0)
    assert completion.finish_reason is FinishReason.abort


def replying(text: str, status: int = 200) -> Handler:
    async def reply(_: web.Request) -> web.Response:
        return web.Response(status=status, text=text)

    return reply


async def silent(_: web.Request) -> web.Response:
    await asyncio.sleep(30)
    return web.Response()


async def hanging_up(given: web.Request) -> web.Response:
    assert given.transport is not None
    given.transport.close()
    return web.Response()


@pytest.mark.parametrize(
    ("handler", "sentence"),
    [
        (replying('{"success": false, "message": "no such group"}'), "/flush was refused (HTTP 200): no such group"),
        (replying("Internal Error", 500), "/flush was refused (HTTP 500): Internal Error"),
        (replying('{"error": "Unauthorized"}', 401), "at {url} refused our key (HTTP 401)"),
        (silent, "no answer to /flush within 1 s"),
        (hanging_up, "/flush failed: ServerDisconnectedError"),
    ],
)
async def test_a_call_that_fails_says_which_engine_and_why(handler: Handler, sentence: str) -> None:
    async with serving(flush=handler) as url:
        client = Client("engine 1", url, None)
        with pytest.raises(EngineError) as caught:
            await client.post("/flush", {}, seconds=1.0)
        await client.close()
    error = str(caught.value)
    assert error.startswith("engine 1")
    assert sentence.format(url=url) in error


async def test_a_server_of_another_width_is_refused(ray_session: None, tmp_path: Path) -> None:
    async with serving(health=replying("{}"), server_info=replying('{"tp_size": 2}')) as url:
        engine = remote(host_spec(tmp_path, name="engine 1", url=url))
        with pytest.raises(EngineError, match=r"has tp_size=2, and not rollout\.tensor_parallel=1"):
            await engine.start(60)


async def test_the_members_of_a_group_have_their_own_request_ids(ray_session: None, tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = []

    async def generate(given: web.Request) -> web.Response:
        body = await given.json()
        bodies.append(body)
        return web.json_response([answer([(-0.5, 7)], "stop") for _ in body["rid"]])

    continued: list[str] = []

    async def goes_on(given: web.Request) -> web.Response:
        continued.append(given.path)
        return web.json_response({})

    routes = dict.fromkeys(("health", "server_info"), replying("{}"))
    async with serving(**routes, continue_generation=goes_on, generate=generate) as url:
        engine = remote(host_spec(tmp_path, name="engine 1", url=url))
        await engine.start(60)
        assert continued == ["/continue_generation"]  # a run before may have ended while it was paused
        for name in ("data/0@0", "data/0@1", "data/1@0", "data/0@0"):
            completions = await engine.generate(request(name, group_size=8, temperature=0.7, max_tokens=5))
            assert [each.token_ids.tolist() for each in completions] == [[7]] * 8
        assert (await engine.stats()).completion_tokens == 32
        await engine.stop()
    assert all(each.endswith(f"/data/0@0#{member}") for member, each in enumerate(bodies[0]["rid"]))
    assert len({name for body in bodies for name in body["rid"]}) == 32  # the same prompt gets new request ids
    assert bodies[0]["input_ids"] == [[21, 15, 22, 33]] * 8
    assert bodies[0]["return_logprob"] is True
    sampling = {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "max_new_tokens": 5, "stop": []}
    assert bodies[0]["sampling_params"] == sampling


async def test_a_long_reply_is_parsed_member_by_member_outside_of_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before each member a health call is answered. `-s` prints how long the loop stood at most without those calls."""
    random = np.random.default_rng(0)
    ids, logprobs = random.integers(0, 150_000, 32_768), -random.exponential(1.0, 32_768).astype(np.float32)
    pairs = list(zip(logprobs.tolist(), ids.tolist(), strict=True))
    text = orjson.dumps([{"output_ids": ids.tolist(), **answer(pairs, "length")}] * 8)
    loop, parsed = asyncio.get_running_loop(), list[tuple[threading.Thread, int, Any]]()

    def load(piece: bytes) -> Any:
        asyncio.run_coroutine_threadsafe(client.healthy(), loop).result(60)
        content = orjson.loads(piece)
        parsed.append((threading.current_thread(), len(piece), content["meta_info"]["output_token_logprobs"]))
        return content

    async def generate(_: web.Request) -> web.Response:
        return web.Response(body=text)

    async with serving(health=replying(""), generate=generate) as url:
        client = Client("engine 1", url, None)
        sample = partial(client.generate, request("data/0@0", group_size=8), list("abcdefgh"), cache_key="")
        stood, last, sampling = 0.0, time.perf_counter(), asyncio.create_task(sample())
        while not sampling.done():
            await asyncio.sleep(0.001)
            stood, last = max(stood, time.perf_counter() - last), time.perf_counter()
        print(f"{len(text) / 1e6:.1f} MB: the event loop stood for {1000 * stood:.0f} ms")  # noqa: T201

        monkeypatch.setattr(clients, "orjson", SimpleNamespace(loads=load, dumps=orjson.dumps))
        for reply in [*await sampling, *await sample()]:
            assert np.array_equal(reply.completion.token_ids, ids)
            assert np.array_equal(reply.completion.logprobs, logprobs)
        await client.close()

    assert len({thread for thread, _, _ in parsed} | {threading.current_thread()}) == 2
    assert max(size for _, size, _ in parsed) < len(text) / 7.9
    assert [len(flat) for _, _, flat in parsed] == [
        1
    ] * 8  # no list for each token, for the garbage collector to follow
