"""Environments of an OpenEnv server, on a stand-in with the wire's messages."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest
from aiohttp import WSMsgType, web

from app.environment import openenv
from app.environment.protocol import EnvironmentFailed, OutOfTurns, Reply, Task, ToolCall
from tests.environment.qwen import chat_choice
from tests.environment.scripted_policy import ScriptedPolicy

SCHEMA = {
    "type": "object",
    "properties": {"guess": {"type": "integer"}, "metadata": {"type": "object"}},
    "required": ["guess"],
    "additionalProperties": False,
}
TASK = Task("t", "Find the number.", "7", "test", {"answer": "7", "low": 0}, seed=11)


class Guessing:
    """A server whose environment wants a number; `faults` replaces the answer to the n-th step."""

    def __init__(self, faults: Mapping[int, Any] | None = None) -> None:
        self.faults = dict(faults or {})
        self.resets: list[Any] = []
        self.closed = 0
        self.heartbeat: float | None = None  # seconds between pings; half of that for the answer

    async def socket(self, request: web.Request) -> web.WebSocketResponse:
        ws = web.WebSocketResponse(heartbeat=self.heartbeat)
        await ws.prepare(request)
        steps = 0
        async for message in ws:
            assert message.type is WSMsgType.TEXT
            asked = json.loads(message.data)
            if asked["type"] == "close":
                self.closed += 1
                break
            if asked["type"] == "reset":
                self.resets.append(asked["data"])
                await self._observe(ws, {"text": "higher than 0"}, None, False)
                continue
            steps += 1
            fault = self.faults.get(steps)
            if fault == "die":
                assert request.transport is not None
                request.transport.abort()
                break
            if fault is not None:
                await ws.send_json(fault)
                continue
            right = asked["data"]["guess"] == 7
            await self._observe(ws, {"text": "right" if right else "wrong"}, 1.0 if right else -0.25, right)
        return ws

    async def _observe(self, ws: web.WebSocketResponse, observation: Any, reward: Any, done: bool) -> None:
        data = {"observation": {**observation, "metadata": {}}, "reward": reward, "done": done}
        await ws.send_json({"type": "observation", "data": data})

    async def schema(self, request: web.Request) -> web.Response:
        return web.json_response({"action": SCHEMA, "observation": {}, "state": {}})


async def play(
    policy: ScriptedPolicy, guessing: Guessing, renderer: str = "plain", framing: Any = None, **args: Any
) -> dict[str, float]:
    app = web.Application()
    app.add_routes([web.get("/ws", guessing.socket), web.get("/schema", guessing.schema)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url, choice = f"ws://127.0.0.1:{runner.addresses[0][1]}", {**chat_choice(), "name": renderer}
    settings = {"url": url, "args": args, "renderer": choice, "limits": {"timeout_s": 60.0}, **(framing or {})}
    try:
        make = await asyncio.to_thread(openenv.make, settings)
        return await make().run(TASK, policy)
    finally:
        await runner.cleanup()


def act(guess: object) -> str:
    return json.dumps({"guess": guess})


async def test_an_episode_sums_its_rewards_and_ends_when_the_server_is_done() -> None:
    policy = ScriptedPolicy([Reply(act(3)), Reply(f"```json\n{act(7)}\n```"), Reply("never")])
    guessing = Guessing()

    assert await play(policy, guessing, low=5) == {"reward": 0.75, "last_reward": 1.0}
    assert guessing.resets == [{"seed": 11, "answer": "7", "low": 5}]
    assert guessing.closed == 1
    question, _, schema = policy.asked[0]["messages"][0]["content"].partition("\n\nAct by ")
    assert question == "Find the number.\n\nhigher than 0"
    assert json.loads(schema.partition(": ")[2]) == {**SCHEMA, "properties": {"guess": {"type": "integer"}}}
    said, observed = policy.asked[1]["messages"][1:]
    assert (said["content"], observed) == (act(3), {"role": "user", "content": "wrong"})
    assert policy.asked[1]["tools"] is None


async def test_a_policy_with_tools_acts_by_a_call_and_hears_its_result() -> None:
    call = Reply("", tool_calls=(ToolCall("step", {"guess": "5"}, "ok", "c1"),))
    policy = ScriptedPolicy([call, Reply("", tool_calls=(ToolCall("step", {"guess": 7}, "ok", "c2"),))])

    assert await play(policy, Guessing(), "chat") == {"reward": 0.75, "last_reward": 1.0}
    (tool,) = policy.asked[0]["tools"]
    assert tool["function"]["name"] == "step"
    assert tool["function"]["parameters"]["properties"] == {"guess": {"type": "integer"}}
    assert policy.asked[0]["messages"][0]["content"] == "Find the number.\n\nhigher than 0"
    assert policy.asked[1]["messages"][2] == {"role": "tool", "name": "step", "tool_call_id": "c1", "content": "wrong"}


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (Reply("seven"), "the reply is not a JSON object"),
        (Reply("[7]"), "the reply is not a JSON object"),
        (Reply("[" * 100_000), "the reply is not a JSON object"),
        (Reply("{}"), "the argument guess is missing"),
        (Reply('{"guess": 7, "cheat": 1}'), "there is no argument cheat"),
        (Reply('{"guess": [7]}'), "the argument guess must be integer, not [7]"),
        (Reply("", tool_calls=(ToolCall("step", {}, "the call was not closed"),)), "the call was not closed"),
        (Reply("", tool_calls=(ToolCall("step", {"guess": 7}, "ok"),) * 2), "there were several calls"),
    ],
)
async def test_what_is_no_action_is_an_observation_and_costs_nothing(reply: Reply, problem: str) -> None:
    policy = ScriptedPolicy([reply, Reply(act(7))])

    assert await play(policy, Guessing()) == {"reward": 1.0, "last_reward": 1.0}
    assert policy.asked[1]["messages"][-1]["content"].startswith(f"error: {problem}")


async def test_the_framing_of_the_data_is_around_the_question() -> None:
    policy = ScriptedPolicy([Reply("", tool_calls=(ToolCall("step", {"guess": 7}, "ok", "c1"),))])
    await play(policy, Guessing(), "chat", {"system": "Be quick.", "prefix": "Task: ", "suffix": " Go!"})
    assert policy.asked[0]["messages"] == [
        {"role": "system", "content": "Be quick."},
        {"role": "user", "content": "Task: Find the number. Go!\n\nhigher than 0"},
    ]


async def test_a_session_lives_on_while_the_policy_takes_longer_than_the_servers_pings_may() -> None:
    class Slow(ScriptedPolicy):
        async def __call__(self, *args: Any, **kwargs: Any) -> Reply:
            await asyncio.sleep(1.0)
            return await super().__call__(*args, **kwargs)

    guessing = Guessing()
    guessing.heartbeat = 0.5
    assert await play(Slow([Reply(act(3)), Reply(act(7))]), guessing) == {"reward": 0.75, "last_reward": 1.0}


async def test_a_limit_of_the_run_keeps_the_rewards_so_far() -> None:
    policy = ScriptedPolicy([Reply(act(1)), OutOfTurns()])
    guessing = Guessing()
    assert await play(policy, guessing) == {"reward": -0.25, "last_reward": -0.25}
    assert guessing.closed == 1


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("die", "ended the session during step"),
        ({"type": "error", "data": {"code": "SESSION_ERROR", "message": "gone"}}, "with SESSION_ERROR: gone"),
        ({"type": "observation"}, "answered step with"),
        ({"type": "observation", "data": {"observation": {}, "reward": "x"}}, "answered step with"),
    ],
)
async def test_a_server_that_fails_is_a_failure_and_no_reward(fault: object, text: str) -> None:
    policy = ScriptedPolicy([Reply(act(1)), Reply(act(7))])
    with pytest.raises(EnvironmentFailed, match=text):
        await play(policy, Guessing({2: fault}))
