"""`environment=tools`: the loop, what the policy reads when a call goes wrong, and what is refused at load."""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from app.environment.protocol import Message
from app.environment.rendering import renderer_for
from app.environment.tool_schema import checked, schema_of
from app.environment.tools import load_tools, make
from tests.environment import my_tools
from tests.environment.pools import a_task
from tests.environment.qwen import chat_choice, decoded, user
from tests.environment.talker import Talker

HERE = "tests.environment.my_tools"
END = "<|im_end|>"
QUESTION = user("Who wrote it?")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    my_tools.EVENTS.clear()
    my_tools.RELEASE.clear()
    my_tools.ASLEEP.clear()
    yield
    my_tools.RELEASE.set()  # threads that hang end


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def making(*names: str, timeout_s: float = 60.0) -> Callable[[], Any]:
    paths = [f"{HERE}.{name}" for name in names]
    return make({"tools": paths, "renderer": chat_choice(), "limits": {"timeout_s": timeout_s}})


def talker_of(*script: str, opening: Sequence[Message] = (QUESTION,)) -> Talker:
    renderer = renderer_for(**chat_choice())
    return Talker(renderer, *script, opening=opening, prompt=renderer.opening(opening))


async def play(
    tools: Sequence[str], *script: str, timeout_s: float = 60.0, opening: Sequence[Message] = (QUESTION,)
) -> Talker:
    """Play an episode in which the policy says these texts."""
    talker = talker_of(*script, opening=opening)
    environment = making(*tools, timeout_s=timeout_s)()
    try:
        await environment.run(a_task(), talker.policy)
    finally:
        await environment.close()
    return talker


async def test_results_are_read_in_one_sequence_until_a_reply_calls_nothing() -> None:
    both = f"I look.\n{call('search', query='it', limit=2)}\n{call('fetch', address='a.b')}{END}"
    opening = [{"role": "system", "content": "Be brief."}, user("Hello."), {"role": "assistant", "content": "Hello."}]
    talker = await play(["search", "fetch"], both, f"It was me.{END}", "never said", opening=[*opening, QUESTION])

    assert list(talker.sequences) == [0]
    head, _, rest = decoded(talker.sequences[0]).partition("Who wrote it?<|im_end|>\n")
    assert head.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert '{"type": "function", "function": {"name": "search"' in head
    assert head.endswith(
        "<|im_start|>user\nHello.<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\n"
    )
    wrapper = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert rest == (
        f"{wrapper}{both}\n<|im_start|>user\n"
        "<tool_response>\n2 pages on it, new, None\n</tool_response>\n"
        '<tool_response>\n{"address": "a.b", "text": "é"}\n</tool_response><|im_end|>\n'
        f"{wrapper}It was me.{END}"
    )
    assert talker.policy.metrics["tool_calls"] == 2
    assert talker.policy.metrics["tool_failures"] == 0


async def test_a_class_has_one_instance_an_episode_in_one_thread_that_is_closed_once() -> None:
    script = [
        call("write", text="a") + call("upper", text="b") + call("read_later") + END,
        call("write", text="c") + END,
        call("read") + END,
        f"done{END}",
    ]
    for _ in range(2):
        assert (await play(["Notes"], *script)).observations == ["1", "B", "7", "2", '["a", "c"]']
    assert my_tools.EVENTS == ["made", "closed", "made", "closed"]

    await play(["Notes"], f"No call.{END}")
    assert len(my_tools.EVENTS) == 4  # not made where nothing is called


async def test_what_goes_wrong_is_an_observation_and_counted() -> None:
    wrong = {
        call("find", query="x"): "error: there is no tool find; the tools are search, fail, leave, leave_async, "
        "cancelled, circular",
        call("search"): "error: search: the argument query is missing; it takes query (string), limit (integer), "
        'order (one of "new", "old"), within (array or null)',
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
    talker = await play(tools, *script, f"I give up.{END}")

    assert talker.observations == [*wrong.values(), *unreadable.values()]
    assert talker.policy.metrics["tool_calls"] == talker.policy.metrics["tool_failures"] == len(script)


@pytest.mark.parametrize("name", ["hang", "sleep"])
async def test_a_late_tool_is_an_observation_and_the_next_one_has_a_thread(name: str) -> None:
    first, again = call(name) + call("search", query="x") + END, call("search", query="y") + END
    talker = await play([name, "search"], first, again, f"So.{END}", timeout_s=0.3)
    assert talker.observations == [
        f"error: {name} took longer than 0.3 s",
        "3 pages on x, new, None",
        "3 pages on y, new, None",
    ]
    assert talker.policy.metrics["tool_failures"] == 1.0


async def test_an_aborted_episode_ends_its_tool_and_closes_its_instances() -> None:
    environment = making("Notes", "sleep", timeout_s=600.0)()
    talker = talker_of(call("write", text="a") + call("sleep") + END)
    running = asyncio.ensure_future(environment.run(a_task(), talker.policy))
    assert await asyncio.to_thread(my_tools.ASLEEP.wait, 60)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await environment.close()
    assert my_tools.EVENTS == ["made", "closed"]


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


def test_arguments_are_given_as_the_hints_say_and_a_string_stands_for_the_value_it_spells() -> None:
    def take(x: float, y: int | None, z: Any, w: dict[str, int], s: str) -> None: ...

    schema: Mapping[str, Any] = schema_of("take", take)
    given = {"x": 1, "y": None, "z": [1], "w": {"a": 1}, "s": "7"}
    assert checked(schema, given) == given
    assert checked(schema, {**given, "x": "1", "y": "2", "w": '{"a": 1}'}) == {**given, "y": 2}
    with pytest.raises(ValueError, match="the argument w must be object"):
        checked(schema, {**given, "w": []})


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]}, [1, "a"], ["a", 1]),
        ({"type": ["string", "null"]}, None, 1),
        ({"type": "array"}, [1, "a"], 1),
    ],
)
def test_schemas_of_other_programs_are_read(schema: dict[str, Any], right: Any, wrong: Any) -> None:
    act = {"function": {"parameters": {"properties": {"cell": schema}, "required": ["cell"]}}}
    assert checked(act, {"cell": right}) == {"cell": right}
    with pytest.raises(ValueError, match="cell must be"):
        checked(act, {"cell": wrong})


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        ([], "environment.tools=[] is not accepted: give dotted paths"),
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
        making(*names)
    assert problem in str(refused.value)
    if names:
        assert str(refused.value).startswith(f"environment.tools={HERE}.{names[-1]} is not accepted: ")
