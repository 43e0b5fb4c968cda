"""`environment=tools environment.tools=[my_tools.search,my_tools.Python]`: a loop over functions that the policy calls.

    question ─→ reply with calls ─→ results ─→ reply with calls ─→ … ─→ reply without a call: the episode ends

A dotted path names a function, which is a tool, or a class, whose public methods are tools. A class has one instance
an episode, made without arguments; its `close` is called when the episode ends.

Invariants:
- What the policy gets wrong is an observation that begins with "error: ": an unknown tool, a call that cannot be
  read, wrong arguments. So are an exception of a tool, and a tool that takes longer than `timeout_s`.
- Synchronous tools run in threads of their own, which die with the process; asynchronous ones are awaited.
"""

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from app.environment.protocol import EpisodeOver, Message, Policy, Reply, Task, ToolCall
from app.environment.rendering import Renderer, renderer_for
from app.environment.threads import Late, in_thread
from app.environment.tool_schema import SchemaError, checked, schema_of
from app.utils.dotted_path import LoadError, resolve

ERROR_CHARACTERS = 500  # of an exception's message


@dataclass(frozen=True, slots=True)
class Tool:
    """A function, or the method `attribute` of the class `owner`."""

    schema: Mapping[str, Any]  # as in OpenAI's `tools`
    function: Callable[..., Any]
    owner: type | None = None
    attribute: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a tool's call."""

    observation_tokens: int
    timeout_s: float


def make(settings: Mapping[str, Any]) -> Callable[[], "ToolLoop"]:
    """Load the tools; return what makes the environment of one episode.

    Args:
        settings: The worker's `start` message: its `environment` has `tools`, and `system` if there is a system
            message; its `limits` and `renderer` are those of all environments.

    Raises:
        ValueError: One sentence that names the tool that cannot be used.
    """
    environment, limits = settings["environment"], settings["limits"]
    tools = load_tools(environment.get("tools") or [])
    bounds = Limits(limits["max_observation_tokens"], limits["timeout_s"])
    renderer = renderer_for(**settings["renderer"])
    system = environment.get("system")

    return lambda: ToolLoop(tools, renderer, bounds, system)


def load_tools(paths: Sequence[str]) -> dict[str, Tool]:
    """Import functions and classes; return their tools by name.

    Raises:
        ValueError: One sentence: `environment.tools=… is not accepted: …`.
    """
    if not paths:
        raise ValueError("environment.tools=[] is not accepted: give dotted paths, such as [my_module.my_tool].")

    tools: dict[str, Tool] = {}
    for path in paths:
        try:
            found = _tools_at(resolve(path))
        except (LoadError, SchemaError) as error:
            raise ValueError(f"environment.tools={path} is not accepted: {error}.") from error

        for name, tool in found.items():
            if name in tools:
                raise ValueError(f"environment.tools={path} is not accepted: there is already a tool {name}.")
            tools[name] = tool
    return tools


def _tools_at(loaded: Callable[..., Any]) -> dict[str, Tool]:
    if not isinstance(loaded, type):
        name = getattr(loaded, "__name__", "")
        if not name.isidentifier():
            raise SchemaError("it has no name")
        return {name: Tool(schema_of(name, loaded), loaded)}

    needed = [
        parameter.name
        for parameter in inspect.signature(loaded).parameters.values()
        if parameter.default is parameter.empty and parameter.kind.name not in ("VAR_POSITIONAL", "VAR_KEYWORD")
    ]
    if needed:
        raise SchemaError(f"an instance needs the argument {needed[0]}; give a class that is made without arguments")

    names = [
        name
        for name, _ in inspect.getmembers(loaded, inspect.isroutine)
        if not name.startswith("_") and name != "close"
    ]
    if not names:
        raise SchemaError("the class has no public method")
    return {name: _method(loaded, name) for name in names}


def _method(owner: type, name: str) -> Tool:
    # bound to nothing in particular: `self` must not be in the schema
    static = inspect.getattr_static(owner, name)
    function = getattr(owner, name) if isinstance(static, staticmethod | classmethod) else static.__get__(object())
    try:
        return Tool(schema_of(name, function), function, owner, name)
    except SchemaError as error:
        raise SchemaError(f"the tool {name} cannot be used: {error}") from error


class CallFailed(Exception):
    """A call without a result. The message is for the policy."""


class ToolLoop:
    """One episode with tools.

    Attributes:
        metrics: `tool_calls`, and `tool_failures` of them whose observation is an error.
    """

    def __init__(self, tools: Mapping[str, Tool], renderer: Renderer, limits: Limits, system: str | None) -> None:
        self.metrics = {"tool_calls": 0, "tool_failures": 0}
        self._tools = tools
        self._renderer = renderer
        self._limits = limits
        self._system = system
        self._instances: dict[type, Any] = {}
        self._making: asyncio.Future[None] | None = None

    async def run(self, task: Task, policy: Policy) -> None:
        """Let the policy speak and call tools until it calls none or has reached a limit."""
        messages: list[Message] = [{"role": "user", "content": task.question}]
        if self._system is not None:
            messages.insert(0, {"role": "system", "content": self._system})
        schemas = [tool.schema for tool in self._tools.values()]

        try:
            while True:
                reply = await policy(messages, tools=schemas)
                if not reply.tool_calls:
                    return
                messages = [*messages, assistant_message(reply)]
                for call in reply.tool_calls:
                    messages.append(await self._answer(call))
        except EpisodeOver:
            return

    async def _answer(self, call: ToolCall) -> Message:
        """Make one call; return the tool's message."""
        self.metrics["tool_calls"] += 1
        try:
            observation = _text(await self._result(call))
        except CallFailed as error:
            self.metrics["tool_failures"] += 1
            observation = f"error: {error}"

        cut = self._renderer.shorten(observation, self._limits.observation_tokens)
        return {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": cut}

    async def _result(self, call: ToolCall) -> Any:
        if call.status != "ok":
            raise CallFailed(call.status)
        if call.name not in self._tools:
            raise CallFailed(f"there is no tool {call.name}; the tools are {', '.join(self._tools)}")

        tool = self._tools[call.name]
        try:
            arguments = checked(tool.schema, call.arguments)
        except ValueError as error:
            raise CallFailed(f"{call.name}: {error}") from error

        function = tool.function
        if tool.owner is not None:
            function = getattr(await self._instance(tool.owner), tool.attribute)
        return await self._call(call.name, function, arguments)

    async def _call(self, name: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        late = f"{name} took longer than {self._limits.timeout_s:g} s"
        try:
            return await _awaited(partial(function, **arguments), self._limits.timeout_s)
        except Late as error:
            raise CallFailed(late) from error
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # a tool raises anything
            raise CallFailed(f"{type(error).__name__}: {error}"[:ERROR_CHARACTERS].rstrip(": ")) from error

    async def _instance(self, owner: type) -> Any:
        """Return the episode's instance of a class, made at its first call.

        Raises:
            Late: It took longer than `timeout_s`; this and whatever the class raises fail the episode.
        """
        if owner not in self._instances:
            self._making = asyncio.ensure_future(in_thread(partial(self._make, owner), self._limits.timeout_s))
            await asyncio.shield(self._making)
        return self._instances[owner]

    def _make(self, owner: type) -> None:
        self._instances[owner] = owner()

    async def close(self) -> None:
        """Call the `close` of each instance.

        Raises:
            Exception: What the first of them raised, after all were called.
        """
        # an instance that is in the making when the episode is aborted is closed, too
        if self._making is not None:
            await asyncio.gather(self._making, return_exceptions=True)

        errors: list[Exception] = []
        for instance in self._instances.values():
            if not callable(getattr(instance, "close", None)):
                continue
            try:
                await _awaited(instance.close, self._limits.timeout_s)
            except Exception as error:  # of the user's code; the other instances are closed first
                errors.append(error)

        self._instances.clear()
        if errors:
            raise errors[0]


def assistant_message(reply: Reply) -> Message:
    """Return a reply as a message of the conversation, in OpenAI's form."""
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
        for call in reply.tool_calls
    ]
    message: dict[str, Any] = {"role": "assistant", "content": reply.text}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if calls:
        message["tool_calls"] = calls
    return message


async def _awaited(call: Callable[[], Any], timeout_s: float) -> Any:
    """Return what `call` returns, or what its coroutine returns.

    Raises:
        Late: There is no result after `timeout_s`.
        Exception: Whatever the call raised.
    """
    function = call.func if isinstance(call, partial) else call
    result = call() if inspect.iscoroutinefunction(function) else await in_thread(call, timeout_s)
    if not inspect.isawaitable(result):
        return result

    try:
        async with asyncio.timeout(timeout_s) as limit:
            return await result
    except TimeoutError as error:
        if limit.expired():
            raise Late from error
        raise
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise  # the episode is aborted
        raise RuntimeError("it was cancelled") from error


def _text(result: Any) -> str:
    """Return a tool's result as an observation: text as it stands, anything else as JSON."""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):
        return str(result)
