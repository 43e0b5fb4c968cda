"""The policy as an HTTP server: agents written with OpenAI's client run as they are."""

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai
import pytest

from app.environment.pool import EnvironmentSpec
from app.environment.protocol import OutOfTokens, OutOfTurns, Reply, ToolCall
from app.environment.wire import End
from app.environment.worker.openai_endpoint import http_server
from app.environment.worker.openai_endpoint.endpoint import SESSION_HEADER, Endpoint
from app.worker.wire import Failed
from tests.environment.pools import Maker, play_one, running_pool
from tests.environment.scripted_policy import ScriptedPolicy, decode, encode

ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


@asynccontextmanager
async def serving(warnings: list[str] | None = None) -> AsyncIterator[Endpoint]:
    said: list[str] = [] if warnings is None else warnings
    endpoint = Endpoint(asyncio.get_running_loop(), said.append)
    try:
        yield endpoint
    finally:
        await endpoint.close()


@asynccontextmanager
async def client_of(policy: ScriptedPolicy) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client of an episode with this policy."""
    async with (
        serving() as endpoint,
        openai.AsyncOpenAI(base_url=endpoint.open(policy).url, api_key="none") as client,
    ):
        yield client


async def tool_agent(url: str, question: str) -> str:
    """A common agent: calls tools until the model answers, and keeps messages as the client's objects dump them."""
    messages: list[Any] = [{"role": "developer", "content": "Use tools."}, {"role": "user", "content": question}]
    async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
        while True:
            done = await client.chat.completions.create(
                model="any", messages=messages, tools=[ADD], temperature=0.2, max_completion_tokens=50
            )
            message = done.choices[0].message
            messages.append(message.model_dump())  # with refusal, audio, annotations: null
            if not message.tool_calls:
                return message.content or ""
            for call in message.tool_calls:
                assert call.type == "function"
                arguments = json.loads(call.function.arguments)
                result = str(arguments["a"] + arguments["b"])
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


async def test_an_agent_with_tools_written_for_openai_extends_one_sequence_by_exact_prefix() -> None:
    first = Reply("", reasoning="let me add", tool_calls=(ToolCall("add", {"a": 2, "b": 3}, "ok"),))
    policy = ScriptedPolicy([first, Reply("", tool_calls=(ToolCall("add", {"a": 5, "b": 4}, "ok"),)), Reply("9")])

    async with serving() as endpoint:
        assert await tool_agent(endpoint.open(policy).url, "2+3+4?") == "9"
    assert len(policy.sequences) == 1
    assert decode(policy.sequences[0]) == (
        "<system>Use tools.<user>2+3+4?<assistant><tool>5<assistant><tool>9<assistant>9"
    )
    assert policy.said() == ["<assistant>", "<assistant>", "<assistant>9"]
    assert [asked["tools"] for asked in policy.asked] == [[ADD]] * 3
    assert [asked["max_tokens"] for asked in policy.asked] == [50] * 3
    assert policy.asked[1]["messages"][2] == {**first.message}, "with the reasoning that the agent never sent back"


async def test_the_answer_has_usage_finish_reason_and_reasoning() -> None:
    policy = ScriptedPolicy([Reply("hello", reasoning="hm"), Reply("cut off", truncated=True)])

    async with client_of(policy) as client:
        ask = [{"role": "user", "content": [{"type": "text", "text": "hi "}, {"type": "text", "text": "you"}]}]
        first = await client.chat.completions.create(model="m", messages=ask)  # type: ignore[arg-type]
        second = await client.chat.completions.create(model="m", messages=ask)  # type: ignore[arg-type]
        models = await client.models.list()

    assert first.choices[0].message.model_dump()["reasoning_content"] == "hm"
    assert (first.choices[0].finish_reason, second.choices[0].finish_reason) == ("stop", "length")
    assert first.usage is not None
    assert (first.usage.prompt_tokens, first.usage.completion_tokens, first.usage.total_tokens) == (12, 16, 28)
    assert [model.id for model in models.data] == ["policy"]
    assert decode(policy.sequences[0]) == "<user>hi you<assistant>hello"


async def test_calls_that_could_not_be_read_are_not_sent_but_stay_in_the_history() -> None:
    broken = Reply("oh", tool_calls=(ToolCall("add", {}, "the call was not closed"),))
    policy = ScriptedPolicy([broken, Reply("done")])

    async with client_of(policy) as client:
        messages: list[Any] = [{"role": "user", "content": "x"}]
        first = await client.chat.completions.create(model="m", messages=messages, tools=[ADD])
        assert first.choices[0].message.tool_calls is None
        messages += [{"role": "assistant", "content": "oh"}, {"role": "user", "content": "again"}]
        await client.chat.completions.create(model="m", messages=messages)
    assert len(policy.sequences) == 1
    assert policy.asked[1]["messages"][1] == broken.message


async def test_equal_replies_with_other_reasoning_keep_their_place_in_the_history() -> None:
    policy = ScriptedPolicy([Reply("yes", reasoning="first"), Reply("yes", reasoning="second"), Reply("end")])

    async with client_of(policy) as client:
        messages: list[Any] = [{"role": "user", "content": "x"}]
        for _ in range(3):
            done = await client.chat.completions.create(model="m", messages=messages)
            messages += [{"role": "assistant", "content": done.choices[0].message.content}]
            messages += [{"role": "user", "content": "sure?"}]
    assert len(policy.sequences) == 1
    assert [message.get("reasoning_content") for message in policy.asked[2]["messages"]][1::2] == ["first", "second"]


@pytest.mark.parametrize(
    ("sent", "meant"),
    [({"reasoning_content": "first"}, "first"), ({"reasoning_content": "second"}, "second"), ({}, "second")],
)
async def test_a_sample_that_is_sent_back_is_the_one_with_its_reasoning_else_the_latest(
    sent: dict[str, str], meant: str
) -> None:
    policy = ScriptedPolicy([Reply("yes", reasoning="first"), Reply("yes", reasoning="second"), Reply("end")])

    async with client_of(policy) as client:
        messages: list[Any] = [{"role": "user", "content": "x"}]
        for _ in range(2):
            await client.chat.completions.create(model="m", messages=messages)
        messages += [{"role": "assistant", "content": "yes", **sent}, {"role": "user", "content": "sure?"}]
        await client.chat.completions.create(model="m", messages=messages)
    assert policy.asked[2]["messages"][1]["reasoning_content"] == meant


@pytest.mark.parametrize(
    ("limit", "code"), [(OutOfTokens(), "context_length_exceeded"), (OutOfTurns(), "episode_over")]
)
async def test_a_limit_of_the_episode_is_a_bad_request_that_the_client_does_not_repeat(
    limit: Exception, code: str
) -> None:
    policy = ScriptedPolicy([limit])

    async with serving() as endpoint:
        seat = endpoint.open(policy)
        async with openai.AsyncOpenAI(base_url=seat.url, api_key="none", max_retries=5) as client:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
        assert caught.value.code == code
        assert seat.over is limit
    assert len(policy.asked) == 1


async def test_an_error_of_the_policy_is_not_repeated_either() -> None:
    policy = ScriptedPolicy([RuntimeError("no renderer"), Reply("never")])

    async with (
        serving() as endpoint,
        openai.AsyncOpenAI(base_url=endpoint.open(policy).url, api_key="none", max_retries=5) as client,
    ):
        with pytest.raises(openai.InternalServerError, match="RuntimeError: no renderer"):
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
    assert len(policy.asked) == 1


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"stream": True}, "stream=true is not supported: a reply is sent as a whole."),
        ({"n": 2}, "n must be 1: send a request for each reply."),
        ({"stop": ["\n"]}, "stop is not supported"),
        ({"logprobs": True}, "logprobs are not supported here"),
        ({"tool_choice": "required"}, "tool_choice must be auto"),
        ({"response_format": {"type": "json_object"}}, "response_format must be text"),
        ({"max_completion_tokens": 0}, "max_completion_tokens must be a whole number of at least 1"),
        ({"tools": [{"type": "web_search"}]}, "tools must be a list of"),
        ({"messages": []}, "messages must be a list of at least one message"),
        ({"messages": [{"role": "function", "content": "x"}]}, "Each message needs a role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
            "Images, audio and files are not supported",
        ),
    ],
)
async def test_what_is_not_served_is_refused_in_one_sentence(asked: dict[str, Any], sentence: str) -> None:
    policy = ScriptedPolicy([Reply("never")])

    async with client_of(policy) as client:
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **asked}
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**body)
        assert sentence in caught.value.message
    assert policy.asked == []


async def test_sampling_settings_of_an_agent_are_ignored_with_one_warning_each() -> None:
    warnings: list[str] = []

    async with serving(warnings) as endpoint:
        for _ in range(2):
            await tool_agent(endpoint.open(ScriptedPolicy([Reply("a")])).url, "x")
    assert warnings == ["The agent's temperature has no effect: the run's rollout settings decide how is sampled."]


async def test_generate_takes_and_gives_token_ids_as_vllm_does() -> None:
    policy = ScriptedPolicy(["ab", "c"])
    opening = encode("1+1=")

    async with serving() as endpoint, aiohttp.ClientSession() as session:
        url = endpoint.open(policy).url.removesuffix("/v1") + "/inference/v1/generate"
        sampling = {"max_tokens": 9, "logprobs": 1, "stop_token_ids": [3], "skip_special_tokens": False}
        body = {"model": "m", "token_ids": opening, "sampling_params": sampling}
        async with session.post(url, json=body) as answer:
            choice = (await answer.json())["choices"][0]
        assert choice["token_ids"] == encode("ab")
        assert choice["logprobs"]["content"] == [
            {"token": f"token_id:{ord('a')}", "logprob": -0.5},
            {"token": f"token_id:{ord('b')}", "logprob": -0.625},
        ]
        assert choice["finish_reason"] == "stop"

        body["token_ids"] = opening + encode("ab;")
        async with session.post(url, json=body) as answer:
            assert answer.status == 200
        for wrong in ([], [1, -2], ["a"], [True], None):
            async with session.post(url, json={"token_ids": wrong}) as answer:
                assert (answer.status, await _message(answer)) == (
                    400,
                    "token_ids must be a list of at least one token id.",
                )
        async with session.post(url, json={"token_ids": [1], "features": {"mm_hashes": {}}}) as answer:
            assert await _message(answer) == "Images, audio and video are not supported: the policy reads text only."
    assert policy.sequences == [opening + encode("ab;c")]
    assert [asked["max_tokens"] for asked in policy.asked] == [9, 9]


async def test_episodes_do_not_meet_and_an_episode_that_is_over_is_gone() -> None:
    policies = [ScriptedPolicy([Reply(f"reply {number}")] * 2) for number in range(2)]

    async with serving() as endpoint:
        seats = [endpoint.open(policy) for policy in policies]
        assert len({seat.url for seat in seats}) == 2
        assert all(len(seat.url.split("/")[3]) >= 32 for seat in seats), "24 random bytes"
        answers = await asyncio.gather(*(tool_agent(seat.url, "x") for seat in seats))
        assert answers == ["reply 0", "reply 1"]

        endpoint.shut(seats[0])
        endpoint.shut(seats[0])
        with pytest.raises(openai.NotFoundError, match="There is no such episode, or it is over"):
            await tool_agent(seats[0].url, "x")
        assert await tool_agent(seats[1].url, "x") == "reply 1"
    assert len(policies[0].asked) == 1


async def test_one_url_serves_episodes_that_are_told_apart_by_a_session() -> None:
    policies = {each: ScriptedPolicy([each]) for each in ("left", "right")}

    async with serving() as endpoint, aiohttp.ClientSession() as session:
        for name, policy in policies.items():
            endpoint.open(policy, session=name)
        url = endpoint.shared_url.removesuffix("/v1") + "/inference/v1/generate"
        for name in policies:
            async with session.post(url, json={"token_ids": [1]}, headers={SESSION_HEADER: name}) as answer:
                assert decode((await answer.json())["choices"][0]["token_ids"]) == name
        async with session.post(url, json={"token_ids": [1]}) as answer:
            assert answer.status == 404
        async with session.get(endpoint.shared_url + "/models") as answer:
            assert answer.status == 200
        guess = endpoint.shared_url.replace(endpoint.shared_url.split("/")[3], "left")
        async with session.get(guess + "/models") as answer:
            assert answer.status == 404, "a session's name alone is no way in"


async def test_a_request_in_flight_ends_with_its_episode() -> None:
    asked = asyncio.Event()

    class Slow(ScriptedPolicy):
        async def generate(self, token_ids: Any, **_: Any) -> Any:
            asked.set()
            await asyncio.Event().wait()

    async with serving() as endpoint, aiohttp.ClientSession() as session:
        seat = endpoint.open(Slow([]))
        url = seat.url.removesuffix("/v1") + "/inference/v1/generate"
        request = asyncio.create_task(session.post(url, json={"token_ids": [1]}))
        await asked.wait()
        endpoint.shut(seat)
        answer = await request
        assert (answer.status, await _message(answer)) == (404, "The episode is over.")


async def test_other_routes_are_named_and_large_or_broken_requests_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "BODY_BYTES", 1 << 20)

    async with serving() as endpoint, aiohttp.ClientSession() as session:
        url = endpoint.open(ScriptedPolicy([])).url
        async with session.post(url + "/responses", json={}) as answer:
            assert "POST /v1/responses is not served, only GET /v1/models, POST /v1/chat" in await _message(answer)
        async with session.post(url + "/chat/completions", data=io.BytesIO(b"[" * 100_000)) as answer:
            assert (answer.status, await _message(answer)) == (400, "The body is not JSON.")
        async with session.post(url + "/chat/completions", data=b"[]") as answer:
            assert await _message(answer) == "The body is not a JSON object."
        async with session.post(url + "/chat/completions", data=io.BytesIO(b"x" * (2 << 20))) as answer:
            assert (answer.status, await _message(answer)) == (413, "The body is larger than 1 MiB.")

        host, port = url.split("/")[2].split(":")
        for bytes_sent, status in [
            (b"hello\r\n\r\n", b"400"),
            (b"GET / HTTP/1.1\r\nx: " + b"a" * (1 << 18) + b"\r\n\r\n", b"431"),
            (b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n", b"411"),
            (b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n", b"400"),
        ]:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(bytes_sent)
            line = await reader.readline()
            assert line.split()[1] == status
            writer.close()


async def test_closing_ends_idle_connections_and_leaves_no_task() -> None:
    async with serving() as endpoint:
        host, port = endpoint.open(ScriptedPolicy([])).url.split("/")[2].split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /none HTTP/1.1\r\n\r\n")
        assert b"404" in await reader.readuntil(b"episode, or it is over")
    assert (await reader.read())[-1:] == b"}", "and then the end of the stream"
    writer.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_url_may_be_asked_for_in_another_thread() -> None:
    async with serving() as endpoint:
        seat = await asyncio.to_thread(endpoint.open, ScriptedPolicy([Reply("b")]))
        assert await tool_agent(seat.url, "x") == "b"


AGENTS = """
import openai

class Once:
    async def run(self, task, policy):
        self.said = []
        async with openai.AsyncOpenAI(base_url=policy.url, api_key="none") as client:
            for _ in range(9):
                done = await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": task.question}])
                self.said.append(done.choices[0].message.content)

class Wrapped(Once):
    async def run(self, task, policy):
        try:
            await super().run(task, policy)
        except openai.BadRequestError as error:
            raise RuntimeError("my framework failed") from error

    def score(self):
        return float(len(self.said))

class Wrong(Once):
    async def run(self, task, policy):
        try:
            await super().run(task, policy)
        except openai.BadRequestError:
            pass
        raise KeyError("a bug")
"""


@pytest.mark.parametrize(
    ("name", "max_turns", "ending", "score"),
    [("Once", 2, "turns", 0.0), ("Wrapped", 2, "turns", 2.0), ("Once", 9, "length", 0.0)],
)
def test_a_limit_that_leaves_an_openai_agent_as_an_error_ends_its_episode_and_is_no_failure(
    own: Maker, name: str, max_turns: int, ending: str, score: float
) -> None:
    end = _played(own(AGENTS, name=name, max_turns=max_turns))
    assert isinstance(end, End), end
    assert (end.ending, end.scores) == (ending, {"score": score})
    assert [turn["text"] for turn in end.turns if turn["role"] == "assistant"] == ["a", "b", "c"][
        : 2 if max_turns == 2 else 3
    ]


def test_a_bug_of_an_agent_after_a_limit_stays_a_failure(own: Maker) -> None:
    end = _played(own(AGENTS, name="Wrong", max_turns=2))
    assert isinstance(end, Failed)
    assert end.text.startswith("run raised KeyError: 'a bug'")


def _played(spec: EnvironmentSpec) -> End | Failed:
    async def run() -> End | Failed:
        async with running_pool(spec) as pool:
            return (await play_one(pool, "a", "b", "c")).end

    return asyncio.run(run())


async def _message(answer: aiohttp.ClientResponse) -> str:
    return str((await answer.json())["error"]["message"])
