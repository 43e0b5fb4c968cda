"""The policy as an HTTP server: agents written with OpenAI's client run as they are."""

import asyncio
import json
from typing import Any

import aiohttp
import openai
import pytest

from app.environment.protocol import OutOfTokens, OutOfTurns, Reply, ToolCall
from app.environment.worker.openai_endpoint.endpoint import SESSION_HEADER, Endpoint
from tests.environment.characters import text_of, tokens
from tests.environment.pools import Maker, a_task, play_one, running_pool
from tests.environment.scripted_policy import ScriptedPolicy

ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


def listening() -> Endpoint:
    return Endpoint(asyncio.get_running_loop(), lambda warning: None)


def client_of(policy: ScriptedPolicy) -> openai.AsyncOpenAI:
    """OpenAI's client of an episode with this policy."""
    return openai.AsyncOpenAI(base_url=listening().open(policy).url, api_key="none", max_retries=5)


def asking(text: str) -> Any:
    return [{"role": "user", "content": text}]


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


async def test_an_agent_with_tools_written_for_openai_sends_back_what_the_policy_said() -> None:
    first = Reply("", reasoning="let me add", tool_calls=(ToolCall("add", {"a": 2, "b": 3}, "ok"),))
    second = Reply("", tool_calls=(ToolCall("add", {"a": 5, "b": 4}, "ok"),))
    policy = ScriptedPolicy([first, second, Reply("9")])

    assert await tool_agent(listening().open(policy).url, "2+3+4?") == "9"
    assert [asked["tools"] for asked in policy.asked] == [[ADD]] * 3
    assert [asked["max_tokens"] for asked in policy.asked] == [50] * 3
    assert policy.asked[2]["messages"] == [
        {"role": "system", "content": "Use tools."},
        {"role": "user", "content": "2+3+4?"},
        first.message,  # with the reasoning that the agent never sent back
        {"role": "tool", "tool_call_id": "call_1_0", "content": "5"},
        second.message,
        {"role": "tool", "tool_call_id": "call_2_0", "content": "9"},
    ]


async def test_the_answer_has_usage_finish_reason_and_reasoning() -> None:
    hello = Reply("hello", reasoning="hm", token_ids=(7,) * 16, prompt_tokens=12)
    policy = ScriptedPolicy([hello, Reply("cut off", truncated=True)])

    async with client_of(policy) as client:
        ask: Any = [{"role": "user", "content": [{"type": "text", "text": "hi "}, {"type": "text", "text": "you"}]}]
        first = await client.chat.completions.create(model="m", messages=ask)
        second = await client.chat.completions.create(model="m", messages=ask)
        models = await client.models.list()

    assert first.choices[0].message.model_dump()["reasoning_content"] == "hm"
    assert (first.choices[0].finish_reason, second.choices[0].finish_reason) == ("stop", "length")
    assert first.usage is not None
    assert (first.usage.prompt_tokens, first.usage.completion_tokens, first.usage.total_tokens) == (12, 16, 28)
    assert [model.id for model in models.data] == ["policy"]
    assert policy.asked[0]["messages"] == asking("hi you")


@pytest.mark.parametrize(
    ("limit", "code"), [(OutOfTokens(), "context_length_exceeded"), (OutOfTurns(), "episode_over")]
)
async def test_a_limit_of_the_episode_is_a_bad_request_that_the_client_does_not_repeat(
    limit: Exception, code: str
) -> None:
    policy = ScriptedPolicy([limit])
    connection = listening().open(policy)

    async with openai.AsyncOpenAI(base_url=connection.url, api_key="none", max_retries=5) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="m", messages=asking("x"))
    assert caught.value.code == code
    assert connection.over is limit
    assert len(policy.asked) == 1


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"stream": True}, "stream "),
        ({"n": 2}, "n must be 1"),
        ({"stop": ["\n"]}, "stop "),
        ({"logprobs": True}, "logprobs "),
        ({"tool_choice": "required"}, "tool_choice "),
        ({"response_format": {"type": "json_object"}}, "response_format "),
        ({"max_completion_tokens": 0}, "max_completion_tokens "),
        ({"tools": [{"type": "web_search"}]}, "tools must"),
        ({"messages": []}, "messages must"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "message 1 is of narrator"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "part of type image_url"),
    ],
)
async def test_what_is_not_served_is_refused_by_name(asked: dict[str, Any], named: str) -> None:
    policy = ScriptedPolicy([Reply("never")])

    async with client_of(policy) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**{"model": "m", "messages": asking("x"), **asked})
    assert named in caught.value.message
    assert policy.asked == []


async def test_generate_takes_and_gives_token_ids_as_vllm_does() -> None:
    policy = ScriptedPolicy(["ab", "c"])
    opening = tokens("1+1=")

    async with aiohttp.ClientSession() as session:
        url = listening().open(policy).url.removesuffix("/v1") + "/inference/v1/generate"
        sampling = {"max_tokens": 9, "logprobs": 1, "stop_token_ids": [3], "skip_special_tokens": False}
        body = {"model": "m", "token_ids": opening, "sampling_params": sampling}
        async with session.post(url, json=body) as answer:
            choice = (await answer.json())["choices"][0]
        assert choice["token_ids"] == tokens("ab")
        assert choice["logprobs"]["content"] == [
            {"token": f"token_id:{ord('a')}", "logprob": -0.5},
            {"token": f"token_id:{ord('b')}", "logprob": -0.625},
        ]
        assert choice["finish_reason"] == "stop"

        body["token_ids"] = opening + tokens("ab;")
        async with session.post(url, json=body) as answer:
            assert answer.status == 200
        for wrong in ([], [1, -2], ["a"], [True], None):
            async with session.post(url, json={"token_ids": wrong}) as answer:
                assert (answer.status, "token_ids must" in await _message(answer)) == (400, True)
        async with session.post(url, json={"token_ids": [1], "features": {"mm_hashes": {}}}) as answer:
            assert (answer.status, "Images" in await _message(answer)) == (400, True)
    assert policy.asked == [
        {"token_ids": opening, "max_tokens": 9},
        {"token_ids": opening + tokens("ab;"), "max_tokens": 9},
    ]


async def test_episodes_do_not_meet_and_an_episode_that_is_over_is_gone() -> None:
    policies = [ScriptedPolicy([Reply(f"reply {number}")] * 2) for number in range(2)]

    endpoint = listening()
    connections = [await asyncio.to_thread(endpoint.open, policy) for policy in policies]  # or in the loop's own thread
    assert len({connection.url for connection in connections}) == 2
    assert all(len(connection.url.split("/")[3]) >= 32 for connection in connections), "24 random bytes"
    answers = await asyncio.gather(*(tool_agent(connection.url, "x") for connection in connections))
    assert answers == ["reply 0", "reply 1"]

    endpoint.shut(connections[0])
    endpoint.shut(connections[0])
    with pytest.raises(openai.NotFoundError):
        await tool_agent(connections[0].url, "x")
    assert await tool_agent(connections[1].url, "x") == "reply 1"
    assert len(policies[0].asked) == 1


async def test_one_url_serves_episodes_that_are_told_apart_by_a_session() -> None:
    policies = {each: ScriptedPolicy([each]) for each in ("left", "right")}

    endpoint = listening()
    async with aiohttp.ClientSession() as session:
        for name, policy in policies.items():
            endpoint.open(policy, session=name)
        url = endpoint.shared_url.removesuffix("/v1") + "/inference/v1/generate"
        for name in policies:
            async with session.post(url, json={"token_ids": [1]}, headers={SESSION_HEADER: name}) as answer:
                assert text_of((await answer.json())["choices"][0]["token_ids"]) == name
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

    endpoint = listening()
    async with aiohttp.ClientSession() as session:
        connection = endpoint.open(Slow([]))
        url = connection.url.removesuffix("/v1") + "/inference/v1/generate"
        request = asyncio.create_task(session.post(url, json={"token_ids": [1]}))
        await asked.wait()
        endpoint.shut(connection)
        answer = await request
        assert (answer.status, await _message(answer)) == (404, "The episode is over.")


AGENTS = """
import asyncio

import openai

class Agent:
    async def run(self, task, policy):
        self.said = []
        try:
            async with openai.AsyncOpenAI(base_url=policy.url, api_key="none") as client:
                for _ in range(9):
                    done = await client.chat.completions.create(
                        model="m", messages=[{"role": "user", "content": task.question}])
                    self.said.append(done.choices[0].message.content)
        except openai.BadRequestError as error:
            if task.row["do"] == "wrap": raise RuntimeError("my framework failed") from error
            if task.row["do"] == "pass": raise
        raise KeyError("a bug")

class Scored(Agent):
    def score(self):
        return float(len(self.said))

class Plain:
    def run(self, task, policy):
        client = openai.OpenAI(base_url=policy.url, api_key="none")
        done = client.chat.completions.create(model="m", messages=[{"role": "user", "content": task.question}])
        return float(done.choices[0].message.content == "a")

class Parallel:
    async def run(self, task, policy):
        async with asyncio.TaskGroup() as group:
            for number in range(3):
                group.create_task(policy([{"role": "user", "content": str(number)}]))
"""


async def test_a_limit_that_leaves_an_openai_agent_as_an_error_ends_its_episode_and_is_no_failure(own: Maker) -> None:
    async with running_pool(own(AGENTS, name="Agent", max_turns=2)) as pool:
        full = (await play_one(pool, "a", task=a_task(row={"do": "pass"}))).scored
        bug = (await play_one(pool, "a", "b", task=a_task(row={"do": "err"}))).failed
    async with running_pool(own(AGENTS, name="Scored", max_turns=2)) as pool:
        turns = (await play_one(pool, "a", "b", task=a_task(row={"do": "wrap"}))).scored

    assert (full.ending, full.scores) == ("length", {"score": 0.0})
    assert (turns.ending, turns.scores) == ("turns", {"score": 2.0})
    assert [turn["text"] for turn in turns.turns if turn["role"] == "assistant"] == ["a", "b"]
    assert bug.text.startswith("run raised KeyError: 'a bug'")


async def test_a_plain_run_may_use_the_policys_url(own: Maker) -> None:
    async with running_pool(own(AGENTS, name="Plain")) as pool:
        assert (await play_one(pool, "a")).scored.scores == {"score": 1.0}


async def test_a_limit_that_one_of_several_tasks_reaches_ends_the_episode_and_is_no_failure(own: Maker) -> None:
    async with running_pool(own(AGENTS, name="Parallel", max_turns=2)) as pool:
        ended = (await play_one(pool, "a", "b")).scored
    assert (ended.ending, ended.scores) == ("turns", {"score": 0.0})


async def _message(answer: aiohttp.ClientResponse) -> str:
    return str((await answer.json())["error"]["message"])
