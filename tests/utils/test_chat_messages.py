"""Messages of every origin in one form, or refused with their number."""

import json
from typing import Any

import pytest

from app.utils.chat_messages import WrongMessages, normalized

ASK = {"role": "user", "content": "Rome?"}
TEXT_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Rome", "day": null}'}}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}


def only(message: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    (found,) = normalized([message], **arguments)
    return dict(found)


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (ASK, ASK),
        ({"from": "human", "value": "Rome?"}, ASK),
        ({"from": "gpt", "value": "Sunny."}, {"role": "assistant", "content": "Sunny."}),
        ({"from": "observation", "value": "sunny"}, {"role": "tool", "content": "sunny"}),
        ({"role": "user", "content": [{"type": "text", "text": "Ro", "url": None}, "me?"]}, ASK),
        ({"role": "user", "content": {"type": "text", "text": "Rome?"}, "name": None, "tool_calls": None}, ASK),
        ({"role": "assistant", "content": None}, {"role": "assistant", "content": ""}),
        ({**ASK, "mood": "good"}, {**ASK, "mood": "good"}),
        ({"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'}, CALLING),
        ({"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}}, CALLING),
        ({"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": {"a": 1}}}, CALLING),
        ({"role": "assistant", "content": "", "function_call": '{"name": "f", "arguments": {"a": 1}}'}, CALLING),
    ],
)
def test_a_message_has_one_form_whoever_wrote_it(given: dict[str, Any], read: dict[str, Any]) -> None:
    assert only(given) == read


@pytest.mark.parametrize(
    "call",
    [
        TEXT_CALL,
        {**TEXT_CALL, "function": {"name": "f", "arguments": {"city": "Rome", "day": None}, "description": None}},
        {"id": "1", "name": "f", "arguments": {"city": "Rome", "day": None}},
    ],
)
@pytest.mark.parametrize("text", [True, False])
def test_arguments_of_calls_are_objects_and_keep_the_nulls_that_were_written(call: Any, text: bool) -> None:
    read = only({"role": "assistant", "tool_calls": json.dumps([call]) if text else [call]})
    (found,) = read["tool_calls"]
    assert (found["id"], found["type"]) == ("1", "function")
    assert found["function"] == {"name": "f", "arguments": {"city": "Rome", "day": None}}


@pytest.mark.parametrize("flag", ["loss_mask", "weight", "train", "loss"])
@pytest.mark.parametrize(("value", "trained"), [(0, False), (False, False), (1, True), (1.0, True), (None, True)])
def test_a_flag_of_the_loss_of_a_reply_has_one_name(flag: str, value: Any, trained: bool) -> None:
    read = only({"role": "assistant", "content": "2", flag: value})
    assert read.get("train", True) is trained
    assert flag == "train" or flag not in read
    assert only({**ASK, flag: value}) == only({**ASK, flag: 0.5}) == ASK


def test_nulls_of_arrow_are_left_out_but_for_arguments_that_the_tool_requires() -> None:
    parameters = {"type": "object", "properties": {"city": {}, "day": {"type": ["string", "null"]}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {**parameters, "required": ["city", "day"]}}}]
    arguments = {"city": {"name": "Rome", "zip": None}, "day": None, "left": None}
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}

    def read(**settings: Any) -> Any:
        return only(message, **settings)["tool_calls"][0]["function"]["arguments"]

    assert read(padded=True, tools=tools) == {"city": {"name": "Rome"}, "day": None}
    assert read(padded=True) == {"city": {"name": "Rome"}}
    assert read() == arguments
    assert only({**ASK, "about": {"place": "Rome", "mood": None}}, padded=True) == {**ASK, "about": {"place": "Rome"}}


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"role": "judge", "content": "x"}, "message 2 is of judge"),
        ({"from": "alien", "value": "x"}, "message 2 is from alien"),
        ("x", "message 2 is of str"),
        ({"role": "user", "content": {"city": "Rome"}}, "message 2 is dict"),
        ({"role": "assistant", "content": "x", "weight": 0.5}, "message 2 is 0.5"),
        ({"role": "assistant", "content": "x", "tool_calls": ["f"]}, "message 2 has others"),
        ({"role": "assistant", "content": "x", "tool_calls": 3}, "message 2 has others"),
    ],
)
def test_what_is_no_message_is_refused_with_its_number(message: Any, why: str) -> None:
    with pytest.raises(WrongMessages) as refused:
        normalized([ASK, message])
    assert why in str(refused.value)
