"""`environment=tools`: the loop, what the policy reads when a call goes wrong, and what is refused at load."""

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.environment.protocol import Message, OutOfTokens, OutOfTurns, Reply, Sampled, Task
from app.environment.rendering import Renderer, renderer_for
from app.environment.tool_schema import checked, schema_of
from app.environment.tools import load_tools, make
from tests.environment import my_tools
from tests.environment.qwen import chat_choice, tokenizer

HERE = "tests.environment.my_tools"
TASK = Task("a/0@0", "Who wrote it?", "me", "a", {}, seed=0, training=True)
END = "<|im_end|>"


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return renderer_for(**chat_choice())


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    my_tools.EVENTS.clear()
    my_tools.RELEASE.clear()
    my_tools.ASLEEP.clear()
    yield
    my_tools.RELEASE.set()  # threads that hang end


class Scripted:
    """A policy that says what it is told to, over the real renderer: one sequence of tokens."""

    url = ""

    def __init__(self, renderer: Renderer, *script: str) -> None:
        self.sequence: list[int] = []
        self.metrics: dict[str, float] = {}
        self.messages: Sequence[Message] = ()
        self.asked = 0
        self._renderer = renderer
        self._script = script

    async def __call__(
        self, messages: Sequence[Message] | None, *, tools: Any = None, max_tokens: int | None = None
    ) -> Reply:
        assert messages is not None
        if self.asked == len(self._script):
            raise OutOfTurns("environment.max_turns")
        if not self.sequence:
            self.sequence = self._renderer.opening(messages, tools)
        else:
            new = messages[len(self.messages) + 1 :]
            following = self._renderer.following(self.sequence, new, tools)
            assert following is not None  # never a new sequence
            self.sequence += following

        sampled: list[int] = tokenizer().encode(self._script[self.asked], add_special_tokens=False).ids
        reply = self._renderer.parse(sampled, self.sequence, tools)
        self.sequence += sampled
        self.messages, self.asked = messages, self.asked + 1
        return reply

    async def generate(self, token_ids: Sequence[int], *, max_tokens: Any = None, logprobs: bool = False) -> Sampled:
        raise NotImplementedError

    def count(self, name: str, amount: float = 1.0) -> None:
        self.metrics[name] = self.metrics.get(name, 0.0) + amount

    @property
    def observations(self) -> list[str]:
        return [str(message["content"]) for message in self.messages if message["role"] == "tool"]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def play(
    renderer: Renderer, tools: Sequence[str], *script: str, timeout_s: float = 60.0, task: Task = TASK, **data: str
) -> Scripted:
    policy = Scripted(renderer, *script)
    paths = [f"{HERE}.{name}" for name in tools]
    factory = make({"tools": paths, "renderer": chat_choice(), "limits": {"timeout_s": timeout_s}, **data})

    async def episode() -> None:
        environment = factory()
        try:
            await environment.run(task, policy)
        finally:
            await environment.close()

    asyncio.run(episode())
    return policy


def test_a_conversation_of_the_data_opens_an_episode_with_tools(renderer: Renderer) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Hello, too."},
        {"role": "user", "content": TASK.question},
    ]
    policy = play(renderer, ["search"], f"Me.{END}", task=replace(TASK, messages=messages), suffix=" Not again.")
    schemas = [tool.schema for tool in load_tools([f"{HERE}.search"]).values()]
    assert policy.messages == messages
    assert policy.sequence[
        : len(policy.sequence) - len(tokenizer().encode(f"Me.{END}", add_special_tokens=False).ids)
    ] == renderer.opening(messages, schemas)


def test_results_are_read_in_one_sequence_until_a_reply_calls_nothing(renderer: Renderer) -> None:
    both = f"I look.\n{call('search', query='it', limit=2)}\n{call('fetch', address='a.b')}{END}"
    policy = play(
        renderer, ["search", "fetch"], both, f"It was me.{END}", "never said", system="Be brief.", suffix=" Think."
    )

    text = tokenizer().decode(policy.sequence, skip_special_tokens=False)
    opening, _, rest = text.partition("Who wrote it? Think.<|im_end|>\n")
    assert opening.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert '{"type": "function", "function": {"name": "search"' in opening
    wrapper = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert rest == (
        f"{wrapper}{both}\n<|im_start|>user\n"
        "<tool_response>\n2 pages on it, new, None\n</tool_response>\n"
        '<tool_response>\n{"address": "a.b", "text": "é"}\n</tool_response><|im_end|>\n'
        f"{wrapper}It was me.{END}"
    )
    assert policy.asked == 2
    assert policy.metrics == {}


def test_a_class_has_one_instance_an_episode_in_one_thread_that_is_closed_once(renderer: Renderer) -> None:
    script = [
        call("write", text="a") + call("upper", text="b") + call("read_later") + END,
        call("write", text="c") + END,
        call("read") + END,
        f"done{END}",
    ]
    for _ in range(2):
        assert play(renderer, ["Notes"], *script).observations == ["1", "B", "7", "2", '["a", "c"]']
    assert my_tools.EVENTS == ["made", "closed", "made", "closed"]

    play(renderer, ["Notes"], f"No call.{END}")
    assert len(my_tools.EVENTS) == 4  # not made where nothing is called


def test_what_goes_wrong_is_an_observation_and_counted(renderer: Renderer) -> None:
    wrong = {
        call("find", query="x"): "error: there is no tool find; the tools are search, fail, leave, leave_async, "
        "cancelled, circular",
        call("search"): "error: search: the argument query is missing; it takes query (string), limit (integer), "
        'order (one of "new", "old"), within (array or null)',
        call("search", query="x", page=1): "error: search: there is no argument page; it takes query (string), "
        'limit (integer), order (one of "new", "old"), within (array or null)',
        call("search", query=["x"]): 'error: search: the argument query must be string, not ["x"]',
        call("search", query="x", limit=1.5): "error: search: the argument limit must be integer, not 1.5",
        call("search", query="x", limit=True): "error: search: the argument limit must be integer, not true",
        call("search", query="x", order="big"): 'error: search: the argument order must be one of "new", "old", '
        'not "big"',
        call("search", query="x", within=[1]): "error: search: the argument within must be array or null, not [1]",
        call("fail", x=1): "error: ZeroDivisionError: 1 by zero",
        call("leave"): "error: SystemExit: 3",
        call("leave_async"): "error: SystemExit: 4",
        call("cancelled"): "error: cancelled was cancelled",
        call("circular"): "error: the result is no text: ValueError: Circular reference detected",
    }
    unreadable = {
        "<tool_call>\n{'name': 1}\n</tool_call>": "error: the arguments of the call are not valid JSON",
        '<tool_call>\n{"name": "search", "arguments": {}}': "error: the call was not closed",
    }
    script = [f"{text}{END}" for text in [*wrong, *unreadable]]
    tools = ["search", "fail", "leave", "leave_async", "cancelled", "circular"]
    policy = play(renderer, tools, *script, f"I give up.{END}")

    assert policy.observations == [*wrong.values(), *unreadable.values()]
    # those that could not be read are counted by the policy
    assert policy.metrics == {"tool_failures": float(len(wrong))}


def test_a_string_stands_for_the_value_it_spells(renderer: Renderer) -> None:
    policy = play(renderer, ["search"], call("search", query="7", limit="2", within='["a"]') + END, f"So.{END}")
    assert policy.observations == ["2 pages on 7, new, ['a']"]


def test_a_late_tool_is_an_observation_and_the_next_one_has_a_thread(renderer: Renderer) -> None:
    for name in ("hang", "sleep"):
        policy = play(
            renderer, [name, "search"], call(name) + call("search", query="x") + END, call("search", query="y") + END,
            f"So.{END}", timeout_s=0.5,
        )  # fmt: skip
        late, next_one, after = policy.observations
        assert late == f"error: {name} took longer than 0.5 s"
        assert next_one == "3 pages on x, new, None"
        assert after == "3 pages on y, new, None"
        assert policy.metrics == {"tool_failures": 1.0}


async def test_an_aborted_episode_ends_its_tool_and_closes_its_instances(renderer: Renderer) -> None:
    environment = make(
        {"tools": [f"{HERE}.Notes", f"{HERE}.sleep"], "renderer": chat_choice(), "limits": {"timeout_s": 600.0}}
    )()
    policy = Scripted(renderer, call("write", text="a") + call("sleep") + END)
    running = asyncio.ensure_future(environment.run(TASK, policy))
    assert await asyncio.to_thread(my_tools.ASLEEP.wait, 60)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await environment.close()
    assert my_tools.EVENTS == ["made", "closed"]


def test_limits_of_the_episode_end_it_without_an_error(renderer: Renderer) -> None:
    assert play(renderer, ["search"], call("search", query="x") + END).asked == 1

    class Full(Scripted):
        async def __call__(self, *_: Any, **__: Any) -> Reply:
            raise OutOfTokens("full")

    async def episode() -> None:
        await make({"tools": [f"{HERE}.search"], "renderer": chat_choice(), "limits": {"timeout_s": 1}})().run(
            TASK, Full(renderer)
        )

    asyncio.run(episode())


def test_all_instances_are_closed_although_one_raises(renderer: Renderer) -> None:
    with pytest.raises(OSError, match="it is stuck"):
        play(renderer, ["Door", "Notes"], call("open") + call("read") + END, f"So.{END}")
    assert my_tools.EVENTS == ["made", "door", "closed"]


def test_a_constructor_that_raises_fails_the_episode(renderer: Renderer) -> None:
    with pytest.raises(OSError, match="no sandbox"):
        play(renderer, ["Broken"], call("open") + END, f"So.{END}")


def test_a_constructor_that_hangs_fails_the_episode(renderer: Renderer) -> None:
    with pytest.raises(TimeoutError, match=r"Hanging\(\) took longer than environment.timeout_s=0.5"):
        play(renderer, ["Hanging"], call("open") + END, f"So.{END}", timeout_s=0.5)


def test_a_schema_says_what_hints_and_docstring_say() -> None:
    assert schema_of("search", my_tools.search) == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the web for pages.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "Words to look for, in any order."},
                    "limit": {"type": "integer", "description": "Pages at most."},
                    "order": {"enum": ["new", "old"]},
                    "within": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
                },
                "required": ["query"],
            },
        },
    }


def test_the_methods_of_a_class_are_tools_without_self() -> None:
    tools = load_tools([f"{HERE}.Notes"])
    assert sorted(tools) == ["read", "read_later", "upper", "write"]
    assert tools["write"].schema["function"]["parameters"]["required"] == ["text"]
    assert tools["upper"].schema["function"]["parameters"]["required"] == ["text"]
    assert tools["read"].schema["function"]["parameters"]["properties"] == {}


def test_a_whole_number_is_a_number_and_a_null_is_none() -> None:
    def take(x: float, y: int | None, z: Any, w: dict[str, int]) -> None: ...

    schema: Mapping[str, Any] = schema_of("take", take)
    given = {"x": 1, "y": None, "z": [1], "w": {"a": 1}}
    assert checked(schema, given) == given
    with pytest.raises(ValueError, match="the argument w must be object"):
        checked(schema, {**given, "w": []})


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        ([], "environment.tools=[] is not accepted: give dotted paths"),
        (["nothing_there"], "module tests.environment.my_tools has no nothing_there"),
        (["EVENTS"], "it is not a function or class"),
        (["untyped"], "its parameter query has no type hint"),
        (["of_bytes"], "its parameter data has the type bytes, which has no JSON form: give str, int, float"),
        (["of_anything"], "its parameter *words: str has no name by which a model could give it"),
        (["of_unknown"], "its type hints cannot be read (name 'Nowhere' is not defined)"),
        (["UntypedMethod"], "the tool open cannot be used: its parameter door has no type hint"),
        (["NeedsKey"], "an instance needs the argument key; give a class that is made without arguments"),
        (["Nothing"], "the class has no public method"),
        (["search", "search"], "there is already a tool search"),
    ],
)
def test_what_cannot_be_a_tool_is_refused_by_name(names: list[str], problem: str) -> None:
    with pytest.raises(ValueError, match=r"^environment\.tools=.* is not accepted: [^\n]*\.$") as refused:
        make({"tools": [f"{HERE}.{name}" for name in names], "renderer": chat_choice(), "limits": {"timeout_s": 60}})
    assert problem in str(refused.value)
    if names:
        assert str(refused.value).startswith(f"environment.tools={HERE}.{names[-1]} is not accepted: ")


def test_a_format_without_tools_is_refused() -> None:
    plain = {**chat_choice(), "name": "plain"}
    with pytest.raises(ValueError, match=r"^environment=tools is not accepted: data\.template=plain has no [^\n]*\.$"):
        make({"tools": [f"{HERE}.search"], "renderer": plain, "limits": {"timeout_s": 60}})


def test_a_missing_module_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"environment\.tools=no_such\.tool is not accepted: there is no module no_such"
    ):
        make({"tools": ["no_such.tool"], "renderer": chat_choice(), "limits": {"timeout_s": 60}})
