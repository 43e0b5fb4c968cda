"""`environment=tools environment.tools=[my_tools.search,my_tools.Python]`: a loop over functions that the policy calls.

    question ─→ reply with calls ─→ results ─→ reply with calls ─→ … ─→ reply without a call: the episode ends

A dotted path names a function, which is a tool, or a class, whose public methods are tools. A class has one instance
an episode, made without arguments; its `close` is called when the episode ends.

Invariants:
- What the policy gets wrong is an observation that begins with "error: ": an unknown tool, a call that cannot be
  read, wrong arguments. So are an exception of a tool, and a tool that takes longer than `environment.timeout_s`.
- Synchronous tools of an episode run in one thread, one after the other; asynchronous ones are awaited.
- A constructor that raises or is late fails the episode.
"""

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from app.environment.protocol import EpisodeOver, Message, Policy, Reply, Task, ToolCall
from app.environment.rendering import renderer_for
from app.environment.tool_schema import SchemaError, checked, schema_of
from app.environment.worker.calls import Calls, Exited
from app.utils.user_code import LoadError, resolve

ERROR_CHARACTERS = 500  # of an exception's message


@dataclass(frozen=True, slots=True)
class ToolFunction:
    """A function, or a method of the class `owner`."""

    schema: Mapping[str, Any]  # as in OpenAI's `tools`
    function: Callable[..., Any]
    owner: type | None = None


def make(settings: Mapping[str, Any]) -> Callable[[], "ToolLoop"]:
    """Load the tools; return the function that makes the environment of one episode.

    Args:
        settings: `tools`, a list of dotted paths; `renderer`, by whose chat format they are called; and `limits`, of
            which `timeout_s` is that of a call.

    Raises:
        ValueError: One sentence that names the tool that cannot be used, or the format that has no tools.
    """
    tools = load_tools(settings.get("tools") or [])
    schemas = [tool.schema for tool in tools.values()]
    try:
        renderer_for(**settings["renderer"]).opening([{"role": "user", "content": ""}], schemas)
    except ValueError as error:
        raise ValueError(f"environment=tools is not accepted: {error}") from error
    return partial(ToolLoop, tools, float(settings["limits"]["timeout_s"]))


def load_tools(paths: Sequence[str]) -> dict[str, ToolFunction]:
    """Import functions and classes; return their tools by name. Raises `ValueError`, which names the one that fails."""
    if not paths:
        raise ValueError("environment.tools=[] is not accepted: give dotted paths, such as [my_module.my_tool].")

    tools: dict[str, ToolFunction] = {}
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


def _tools_at(loaded: Callable[..., Any]) -> dict[str, ToolFunction]:
    if not isinstance(loaded, type):
        name = getattr(loaded, "__name__", "")
        if not name.isidentifier():
            raise SchemaError("it has no name")
        return {name: ToolFunction(schema_of(name, loaded), loaded)}

    needed = [
        parameter.name
        for parameter in inspect.signature(loaded).parameters.values()
        if parameter.default is parameter.empty and parameter.kind.name not in ("VAR_POSITIONAL", "VAR_KEYWORD")
    ]
    if needed:
        raise SchemaError(f"an instance needs the argument {needed[0]}; give a class that is made without arguments")

    members = (name for name, _ in inspect.getmembers(loaded, inspect.isroutine))
    names = [name for name in members if not name.startswith("_") and name != "close"]
    if not names:
        raise SchemaError("the class has no public method")
    return {name: _method(loaded, name) for name in names}


def _method(owner: type, name: str) -> ToolFunction:
    # bound to nothing in particular: `self` must not be in the schema
    static = inspect.getattr_static(owner, name)
    function = getattr(owner, name) if isinstance(static, staticmethod | classmethod) else static.__get__(object())
    try:
        return ToolFunction(schema_of(name, function), function, owner)
    except SchemaError as error:
        raise SchemaError(f"the tool {name} cannot be used: {error}") from error


class CallFailed(Exception):
    """A call without a result. The message is for the policy."""


class ToolLoop:
    """One episode with tools."""

    limits_itself = True  # each call has `timeout_s`, not the whole run

    def __init__(self, tools: Mapping[str, ToolFunction], timeout_s: float) -> None:
        self._tools = tools
        self._timeout_s = timeout_s
        self._instances: dict[type, Any] = {}
        self._calls = Calls()

    @property
    def stuck(self) -> bool:
        return self._calls.stuck

    async def run(self, task: Task, policy: Policy) -> None:
        """Sample the policy and run its tool calls until it calls none or hits a limit. There is no score."""
        schemas = [tool.schema for tool in self._tools.values()]
        messages: list[Message] = []  # after the data set's prompt

        try:
            reply = await policy(None, tools=schemas)
            while reply.tool_calls:
                messages += [reply.message, *await self._answers(reply, policy)]
                reply = await policy(messages, tools=schemas)
        except EpisodeOver:
            return  # the policy has noted which limit it was

    async def _answers(self, reply: Reply, policy: Policy) -> list[Message]:
        answers: list[Message] = []
        for call in reply.tool_calls:
            try:
                observation = _text(await self._result(call))
            except CallFailed as error:
                observation = f"error: {error}"
                # the policy itself counts calls, and as failures those that could not be read
                policy.count("tool_failures", float(call.ok))
            answers.append({"role": "tool", "name": call.name, "tool_call_id": call.id, "content": observation})
        return answers

    async def _result(self, call: ToolCall) -> Any:
        if not call.ok:
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
            if tool.owner not in self._instances:
                await self._create(tool.owner)
            function = getattr(self._instances[tool.owner], call.name)
        return await self._call(call.name, partial(function, **arguments))

    async def _create(self, owner: type) -> None:
        def create() -> None:
            self._instances[owner] = owner()

        late = TimeoutError(f"{owner.__name__}() took longer than environment.timeout_s={self._timeout_s:g}")
        await self._within_limit(create, late)

    async def _call(self, name: str, function: Callable[[], Any]) -> Any:
        try:
            return await self._within_limit(function, CallFailed(f"{name} took longer than {self._timeout_s:g} s"))
        except CallFailed:
            raise
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # the episode is aborted
            raise CallFailed(f"{name} was cancelled") from error
        except Exception as error:  # a tool raises anything
            raise CallFailed(_shown(error)) from error

    async def _within_limit(self, function: Callable[[], Any], late: Exception) -> Any:
        """Call a function; raise `late` after `timeout_s`, and then the next call has a thread of its own."""
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                return await self._calls(function)
        except Exception as error:
            if not limit.expired():
                raise
            if self._calls.busy:
                self._calls.end()
            raise late from error

    async def close(self) -> None:
        """Call the `close` of each instance; then raise the first error of them."""
        await self._calls.until_idle(None)  # an instance may still be made
        errors: list[Exception] = []
        for instance in self._instances.values():
            if not callable(getattr(instance, "close", None)):
                continue
            try:
                await self._calls(instance.close)
            except Exception as error:  # of the user's code; the other instances are closed first
                errors.append(error)

        self._instances.clear()
        self._calls.end()
        if errors:
            raise errors[0]


def _text(result: Any) -> str:
    """Return a tool's result as an observation: text as it stands, anything else as JSON."""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False, default=str)
    except Exception as error:  # of a `__str__`, or of values that JSON cannot hold
        raise CallFailed(f"the result is no text: {_shown(error)}") from error


def _shown(error: Exception) -> str:
    text = str(error) if isinstance(error, Exited) else f"{type(error).__name__}: {error}"
    return text[:ERROR_CHARACTERS].rstrip(": ")
