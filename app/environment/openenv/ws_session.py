"""One session of an OpenEnv server: a WebSocket, which has an environment of its own there."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from app.environment.protocol import EnvironmentFailed, Reply
from app.environment.tool_schema import checked

CAPACITY = "CAPACITY_REACHED"
OF_THE_ACTION = ("VALIDATION_ERROR", "EXECUTION_ERROR")  # errors of a step, which the policy can act on
PAUSES_S = (0.1, 2.0)  # between two tries for a session: the first, the longest
WAIT_FRACTION = 0.8  # of environment.timeout_s, at which the worker would fail the episode
MESSAGE_BYTES = 64 << 20
CLOSE_S = 2.0


class NoSession(Exception):
    """The server has no free session now."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What the server answers."""

    text: str
    reward: float
    done: bool


@dataclass(frozen=True, slots=True)
class Session:
    """One WebSocket to the server at `_url`: an environment of its own there."""

    _url: str
    _socket: Any
    _received: "asyncio.Queue[str | None]"  # None: the connection has ended

    async def ask(self, kind: str, data: Mapping[str, Any]) -> Observation:
        """Send a message and read the observation that answers it.

        Raises:
            ActionError: The server refuses the action.
            NoSession: It has no free session.
            EnvironmentFailed: Any other error, or the connection ended.
        """
        with contextlib.suppress(ConnectionError):  # then what ended the connection is to be read
            await self._socket.send_str(json.dumps({"type": kind, "data": dict(data)}, default=str))
        text = await self._received.get()
        if text is None:
            raise EnvironmentFailed(f"the server at {self._url} ended the session during {kind}")

        try:
            message = json.loads(text)
            answer = message["data"]
            if message["type"] == "error":
                raise self._error(kind, answer)
            reward = float(answer.get("reward") or 0)
            done = bool(answer.get("done"))
            return Observation(_shown(answer["observation"]), reward, done)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise EnvironmentFailed(f"{self._url} answered {kind} with {text[:200]!r}") from error

    def _error(self, kind: str, error: Mapping[str, Any]) -> Exception:
        code, text = str(error.get("code")), str(error.get("message"))
        if code == CAPACITY:
            return NoSession(f"{error.get('max_sessions', 'all')}")
        if kind == "step" and code in OF_THE_ACTION:
            details = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.get("errors", ())]
            return ActionError("; ".join(details) or text)
        return EnvironmentFailed(f"the server at {self._url} answered {kind} with {code}: {text}")


@contextlib.asynccontextmanager
async def open_session(
    url: str, timeout_s: float, reset: Mapping[str, Any]
) -> AsyncIterator[tuple[Session, Observation]]:
    """Open a session of the server at `url` and reset it; wait for a free one, a fraction of `timeout_s`."""
    import aiohttp

    ws_url = url.replace("http", "ws", 1) + "/ws"
    wait_s = timeout_s * WAIT_FRACTION
    deadline = time.monotonic() + wait_s
    pause = PAUSES_S[0]
    async with aiohttp.ClientSession() as client:
        while True:
            try:
                socket = await client.ws_connect(
                    ws_url, max_msg_size=MESSAGE_BYTES, timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_S)
                )
            except (aiohttp.ClientError, OSError) as error:
                raise EnvironmentFailed(f"there is no server at {url} any more ({error})") from error

            async with _received(socket) as received:
                session = Session(url, socket, received)
                try:
                    observation = await session.ask("reset", reset)
                except NoSession as full:
                    if time.monotonic() >= deadline:
                        raise EnvironmentFailed(
                            f"the server at {url} had no free session for {wait_s:g} s: it holds {full}; let "
                            "no more environment.episodes run at once, or raise the server's max_concurrent_envs"
                        ) from full
                else:
                    yield session, observation
                    with contextlib.suppress(ConnectionError):
                        await socket.send_str(json.dumps({"type": "close"}))
                    return
            await asyncio.sleep(pause)
            pause = min(2 * pause, PAUSES_S[1])


@contextlib.asynccontextmanager
async def _received(socket: Any) -> AsyncIterator["asyncio.Queue[str | None]"]:
    """Receive all the time, and close the socket at the end.

    Receiving answers the server's pings. One that gets no answer while the policy writes ends the session: uvicorn
    after 20 to 40 seconds.
    """
    received: asyncio.Queue[str | None] = asyncio.Queue()

    async def receive() -> None:
        try:
            while isinstance(text := (await socket.receive()).data, str):
                received.put_nowait(text)
        finally:
            received.put_nowait(None)

    async with socket:
        receiving = asyncio.create_task(receive())
        try:
            yield received
        finally:
            await socket.close()
            await asyncio.gather(receiving, return_exceptions=True)


def _shown(observation: Mapping[str, Any]) -> str:
    """An observation as text: its JSON, or the text itself where it is one."""
    fields = {name: value for name, value in observation.items() if name != "metadata" or value}
    if len(fields) == 1 and isinstance(text := next(iter(fields.values())), str):
        return text
    return json.dumps(fields, ensure_ascii=False)


class ActionError(Exception):
    """The reply is no action, or the server refuses it. The message is for the policy."""


def read_action(reply: Reply, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the action in a reply. Raises `ActionError` if there is none that fits the schema."""
    if len(reply.tool_calls) > 1:
        raise ActionError("there were several calls; act once")
    if reply.tool_calls:
        (call,) = reply.tool_calls
        if not call.ok:
            raise ActionError(call.status)
        action: object = dict(call.arguments)
    else:
        text = reply.text.strip()
        if text.startswith("```") and text.endswith("```"):
            text = text.removesuffix("```").partition("\n")[2]
        try:
            action = json.loads(text)
        except (ValueError, RecursionError):
            raise ActionError("the reply is not a JSON object") from None
    if not isinstance(action, dict):
        raise ActionError("the reply is not a JSON object")

    known = action
    if schema.get("additionalProperties") is not False:
        known = {name: value for name, value in action.items() if name in schema["properties"]}
    try:
        return {**action, **checked({"function": {"parameters": schema}}, known)}
    except ValueError as error:
        raise ActionError(str(error)) from error
