"""Conversations of several families by their own chat templates; transformers is the reference, token by token."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from app.environment.rendering import renderer_for
from app.environment.rendering.agreement import first_difference
from app.environment.rendering.chat import ChatRenderer
from tests.environment.families import FAMILIES, by_transformers, write_family
from tests.environment.qwen import followed

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        },
    }
]
SYSTEM = {"role": "system", "content": "Be brief."}
QUESTION = {"role": "user", "content": "How much is 1+2?"}
NEXT = {"role": "user", "content": "And 4?\n\n"}
RESULT = {"role": "tool", "content": '{"sum": 3}'}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
WITH_TOOLS = [name for name, family in FAMILIES.items() if family.call]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: write_family(folder / name, family) for name, family in FAMILIES.items()}


def renderer_of(folder: Path, **choice: Any) -> ChatRenderer:
    renderer = renderer_for("chat", str(folder), **choice)
    assert isinstance(renderer, ChatRenderer)
    return renderer


def reference(folder: Path, messages: Sequence[dict[str, Any]], tools: Any = None) -> list[int]:
    tokenizer = by_transformers(folder)
    text = tokenizer.apply_chat_template(
        list(messages), tools=tools, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_the_script_has_the_tokens_of_transformers(models: dict[str, Path], name: str) -> None:
    for thinking in (False, True):
        renderer = renderer_of(models[name], enable_thinking=thinking)
        assert first_difference(renderer, by_transformers(models[name]), {"enable_thinking": thinking}) is None


@pytest.mark.parametrize("name", sorted({*FAMILIES} - {"r1", "glm4.5"}))
def test_a_sequence_of_two_turns_is_the_templates_own_conversation(models: dict[str, Path], name: str) -> None:
    renderer = renderer_of(models[name])
    said = "It is 3.\n" if name == "phi3" else "It is 3."
    whole = reference(models[name], [SYSTEM, QUESTION, {"role": "assistant", "content": said}, NEXT])
    for stop in (FAMILIES[name].stops[0], ""):
        sequence = renderer.opening([SYSTEM, QUESTION]) + renderer.tokenizer.encode(said + stop)
        assert sequence + followed(renderer, sequence, [NEXT]) == whole


@pytest.mark.parametrize("name", sorted({*WITH_TOOLS} - {"glm4.5"}))
def test_a_sequence_through_a_tool_call_is_the_templates_own_conversation(models: dict[str, Path], name: str) -> None:
    renderer, family = renderer_of(models[name]), FAMILIES[name]
    sequence = renderer.opening([QUESTION], TOOLS) + renderer.tokenizer.encode(family.call + family.stops[0])
    calling = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    whole = reference(models[name], [QUESTION, calling, RESULT], TOOLS)
    assert sequence + followed(renderer, sequence, [RESULT], TOOLS) == whole


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_calls_are_read_in_the_syntax_of_the_template(models: dict[str, Path], name: str) -> None:
    renderer, family = renderer_of(models[name]), FAMILIES[name]
    assert renderer.tool_syntax == family.syntax
    reply = renderer.tokenizer.encode(family.call + family.stops[-1])
    (call,) = renderer.parse(reply, renderer.opening([QUESTION], TOOLS), TOOLS).tool_calls
    assert (call.name, dict(call.arguments), call.status) == ("add", {"a": 1}, "ok")
    answer = renderer.tokenizer.encode("It is 3." + family.stops[0])
    assert renderer.parse(answer, renderer.opening([QUESTION])).text == "It is 3."


def test_a_template_that_strips_reasoning_begins_a_new_sequence(models: dict[str, Path]) -> None:
    renderer, end = renderer_of(models["r1"]), FAMILIES["r1"].stops[0]
    opening = renderer.opening([QUESTION])
    reply = renderer.tokenizer.encode(f"Hm.\n</think>\n\nIt is 3.{end}")
    assert renderer.following(opening + reply, [NEXT]) is None
    assert renderer.parse(reply, opening).reasoning == "Hm."
    assert renderer.parse(reply, opening).text == "It is 3."
    assert renderer_of(models["r1"], thinking="keep").following(opening + reply, [NEXT]) is not None


def test_the_token_that_ends_a_reply_may_begin_the_next_message(models: dict[str, Path]) -> None:
    renderer = renderer_of(models["glm4.5"])
    encode = renderer.tokenizer.encode
    sequence = renderer.opening([QUESTION], TOOLS) + encode(FAMILIES["glm4.5"].call)
    by_result, by_user = encode("<|observation|>"), encode("<|user|>")
    after = followed(renderer, sequence, [RESULT], TOOLS)
    assert after[:1] == by_result
    assert renderer.following(sequence + by_result, [RESULT], TOOLS) == after[1:]
    assert renderer.following(sequence + by_user, [RESULT], TOOLS) == after  # sampled, and kept


def test_a_model_that_ends_replies_with_another_token_than_its_template_is_refused(tmp_path: Path) -> None:
    base = dataclasses.replace(FAMILIES["smollm2"], stops=("<|endoftext|>",))
    with pytest.raises(ValueError, match=r"ends a reply with <\|endoftext\|> .* writes '<\|im_end\|>"):
        renderer_for("chat", str(write_family(tmp_path, base)))


def test_a_template_has_the_variables_that_transformers_gives(tmp_path: Path) -> None:
    source = "{{ bos_token }}{{ strftime_now('%Y') }}{% for m in messages %}" + (
        "{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
        "{% else %}{{ m.content | tojson(separators=(',', ':'), sort_keys=True) }}{% endif %}\n{% endfor %}assistant: "
    )
    family = dataclasses.replace(FAMILIES["llama3"], template=source)
    folder = write_family(tmp_path, family)
    messages = [QUESTION, {"role": "assistant", "content": "3"}, NEXT]
    assert renderer_of(folder).opening(messages) == reference(folder, messages)
