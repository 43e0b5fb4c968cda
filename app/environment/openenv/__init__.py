"""`environment=openenv`: an environment that an OpenEnv server runs (openenv 0.4 or later).

    python -m app environment=openenv environment.url=ws://127.0.0.1:8000 reward=environment

    worker ── {"type": "reset" | "step" | "close", "data": …} ──→ server, one WebSocket an episode
           ←─ {"type": "observation", "data": {"observation", "reward", "done"}} or {"type": "error", …} ──

- `reset` gets the task's seed, then the columns of its row, then `environment.args`; a later value wins.
- The policy acts by one JSON object: its reply, or the arguments of a tool call. What does not fit the action's schema
  (`GET /schema`), and what the server refuses, is an observation: "error: …".
- The score is the sum of all rewards. The episode ends with `done`, or by a limit of the run.
- A server without a free session is tried again until a deadline; a server that is gone is a failure, never a reward.
"""

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from typing import Any

from app.environment.openenv.ws_session import ActionError, Observation, Session, open_session, read_action
from app.environment.protocol import EpisodeOver, Message, Policy, Reply, Task, Tool
from app.environment.rendering import PLAIN, renderer_for
from app.environment.worker.episode import opening_of
from app.utils.user_code import LoadError

SCHEMA_S = 10.0  # for GET /schema


def make(settings: Mapping[str, Any]) -> partial["OpenEnv"]:
    """Fetch the server's schema; return the function that makes an episode's environment. Raises `LoadError`."""
    try:
        import aiohttp  # noqa: F401
    except ImportError as error:
        raise LoadError(f"it needs aiohttp ({error})") from error

    given = settings.get("url")
    scheme, found, host = str(given or "").rstrip("/").removesuffix("/ws").partition("://")
    if not found or not host or scheme not in ("ws", "wss", "http", "https"):
        raise LoadError(f"environment.url={given} is not the URL of a server: give ws://host:port")
    url = f"{'https' if scheme in ('wss', 'https') else 'http'}://{host}"
    schema = _action_schema(url, str(given))

    tool = {"type": "function", "function": {"name": "step", "description": "Act.", "parameters": schema}}
    choice = settings["renderer"]
    has_tools = choice["name"] != PLAIN and renderer_for(**choice).tool_syntax is not None
    tools = [tool] if has_tools else []
    timeout_s = float(settings["limits"]["timeout_s"])
    return partial(OpenEnv, url, timeout_s, schema, tools, dict(settings.get("args") or {}), settings)


@dataclass(eq=False)
class OpenEnv:
    """The environment of one episode."""

    _url: str  # of the server: http://…
    _timeout_s: float  # environment.timeout_s
    _schema: Mapping[str, Any]
    _tools: Sequence[Tool]  # the action as a tool, if the template has tools
    _reset: Mapping[str, Any]  # arguments
    _framing: Mapping[str, Any]  # of a question: data.system, data.prefix and data.suffix

    async def run(self, task: Task, policy: Policy) -> dict[str, float]:
        """Play the episode; return its sum of rewards, and the last. Raises `EnvironmentFailed` if the server fails."""
        reset = {"seed": task.seed, **task.row, **self._reset}
        async with open_session(self._url, self._timeout_s, reset) as (session, observation):
            rewards = [observation.reward]
            messages = self._opening(task, observation)
            try:
                while not observation.done:
                    reply = await policy(messages, tools=self._tools or None)
                    observation = await self._step(session, reply, policy)
                    rewards.append(observation.reward)
                    messages = [*messages, reply.message, *_messages(reply, observation)]
            except EpisodeOver:
                pass  # the policy has noted which limit it was
        return {"reward": sum(rewards), "last_reward": rewards[-1]}

    def _opening(self, task: Task, observation: Observation) -> list[Message]:
        """What the policy reads first: earlier messages, then question, observation, and without tools how to act."""
        earlier = opening_of(task, self._framing)
        has_question = earlier[-1]["role"] == "user"  # else a tool's result is the last one
        parts = [earlier.pop()["content"] if has_question else "", observation.text]
        if not self._tools:
            parts.append(f"Act by replying with one JSON object of this schema: {json.dumps(self._schema)}")
        return [*earlier, {"role": "user", "content": "\n\n".join(part for part in parts if part)}]

    async def _step(self, session: Session, reply: Reply, policy: Policy) -> Observation:
        """Take the policy's action. One that is no call counts as an action, so that failures are a share of them."""
        policy.count("tool_calls", float(not reply.tool_calls))
        try:
            return await session.ask("step", read_action(reply, self._schema))
        except ActionError as error:
            # the policy itself counts calls that could not be read
            policy.count("tool_failures", float(all(call.ok for call in reply.tool_calls)))
            return Observation(f"error: {error}", 0.0, False)


def _messages(reply: Reply, observation: Observation) -> list[Message]:
    """The observation as the answer to the calls of a reply, or to its text."""
    if not reply.tool_calls:
        return [{"role": "user", "content": observation.text}]
    return [
        {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": observation.text}
        for call in reply.tool_calls
    ]


def _action_schema(url: str, shown: str) -> dict[str, Any]:
    """Return the schema of a server's actions. Raises `LoadError`, which names the URL as `shown`."""
    try:
        with urllib.request.urlopen(f"{url}/schema", timeout=SCHEMA_S) as answer:
            schema: dict[str, Any] = dict(json.load(answer)["action"])
            properties = dict(schema.get("properties", {}))
    except urllib.error.HTTPError as error:
        raise LoadError(f"environment.url={shown} is not an OpenEnv server: GET /schema is {error.code}") from error
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise LoadError(f"environment.url={shown} does not answer ({reason}): start the server first") from error
    except (ValueError, LookupError, TypeError, HTTPException) as error:
        raise LoadError(f"environment.url={shown} is not an OpenEnv server: GET /schema has no action") from error

    properties.pop("metadata", None)
    return {"required": [], **schema, "properties": properties}
