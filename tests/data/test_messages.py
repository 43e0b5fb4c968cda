"""A column of chat messages is a prompt: whole, with the model's template, or refused with its row."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from app.config.data import DataConfig, Template
from app.data import rows
from app.data.prompts import PromptData, build, rendering_warnings
from app.model.hf_directory import load_tokenizer
from app.types import Prompt
from tests.byte_level import write_tokenizer
from tests.environment.qwen import user, write_model
from tests.refusals import refused

Jsonl = Callable[..., str]
SYSTEM = {"role": "system", "content": "You add."}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
CONVERSATIONS = {
    "one": [user("1+1=")],
    "system": [SYSTEM, user("1+2=")],
    "turns": [SYSTEM, user("1+3="), {"role": "assistant", "content": "4"}, user("And one more?")],
    "tools": [
        user("Use the tool for 1+2."),
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "add", "tool_call_id": "1", "content": "3"},
    ],
}


def tokenizer_of(family: str, folder: Path) -> Any:
    template = (write_model(folder, family) / "chat_template.jinja").read_text()
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), chat_template=template)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tokenizer_of("qwen3", tmp_path_factory.mktemp("model"))


def config_of(path: str | None, **changes: Any) -> DataConfig:
    settings: dict[str, Any] = {"path": path, "question": "prompt", "template": Template.chat, "shuffle": False}
    return DataConfig(**settings | changes)


def prompts(config: DataConfig, tokenizer: Any) -> list[Prompt]:
    data: PromptData = build(config, tokenizer, seed=0, max_prompt_tokens=1000)
    found = [*data.train.take(len(data.train)), *(each for part in data.evals.values() for each in part)]
    return sorted(found, key=lambda prompt: prompt.id.split("/")[1])


@pytest.fixture(params=["jsonl", "parquet"])
def stored(request: pytest.FixtureRequest, jsonl: Jsonl, tmp_path: Path) -> str:
    """The conversations, each as a row; Parquet gives every message the fields of all of them."""
    records = [{"prompt": messages, "answer": "2"} for messages in CONVERSATIONS.values()]
    if request.param == "jsonl":
        return jsonl(*records)
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), file)
    return str(file)


@pytest.mark.parametrize(("family", "thinking"), [("qwen3", False), ("qwen3", True), ("qwen3.5", True)])
def test_a_conversation_is_rendered_as_the_models_template_renders_it(
    stored: str, family: str, thinking: bool, tmp_path: Path
) -> None:
    model = tokenizer_of(family, tmp_path / "model")
    config = config_of(stored, thinking=thinking, eval_path=stored)
    expected = [
        model.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=True, return_dict=False, enable_thinking=thinking
        )
        for messages in CONVERSATIONS.values()
    ]
    data = build(config, model, seed=0, max_prompt_tokens=1000)
    found = data.train.take(4)
    assert [prompt.token_ids.tolist() for prompt in found] == expected
    assert [prompt.token_ids.tolist() for prompt in data.evals["eval"]] == expected
    assert "<tool_response>" in model.decode(expected[3])
    assert model.decode(expected[2]).count("<|im_start|>user") == 2

    # for rewards: the last message's text, and all messages
    assert [prompt.question for prompt in found] == ["1+1=", "1+2=", "And one more?", "3"]
    assert [list(prompt.messages) for prompt in found] == list(CONVERSATIONS.values())
    assert [len(prompt.row["prompt"]) for prompt in found] == [1, 2, 4, 3]


def test_text_of_the_data_stands_around_the_last_question(jsonl: Jsonl, model: Any) -> None:
    path = jsonl(*[{"prompt": messages, "answer": "2"} for messages in CONVERSATIONS.values()])
    *_, turns, tools = prompts(config_of(path, suffix=" Reply with a number."), model)
    assert [message["content"] for message in turns.messages] == [
        "You add.",
        "1+3=",
        "4",
        "And one more? Reply with a number.",
    ]
    assert tools.messages[0]["content"] == "Use the tool for 1+2. Reply with a number."
    assert tools.messages[-1]["content"] == "3"
    with refused("data.system", "Add.", "row 2 of"):
        prompts(config_of(path, system="Add."), model)


WRONG: list[tuple[list[Any], str]] = [
    ([user("q"), {"role": "assistant", "content": "a"}], "the role assistant"),
    ([user("q"), SYSTEM], "the role system"),
    ([user("q"), {"role": "user", "content": [{"type": "image", "url": "x"}]}], "part of type image"),
    ([user("\ud800")], "unpaired surrogate"),
    ([user("q"), user(" \n")], "the last of the role user is empty"),
    ([{"role": "user", "content": []}], "the last of the role user is empty"),
]


@pytest.mark.parametrize(("messages", "why"), WRONG, ids=[why for _, why in WRONG])
def test_messages_that_cannot_be_a_prompt_are_refused_with_their_row(
    jsonl: Jsonl, messages: list[Any], why: str
) -> None:
    path = jsonl({"prompt": [user("q")], "answer": "a"}, {"prompt": messages, "answer": "a"})
    with refused("data.question", "prompt", why, f"row 2 of {path}"):
        rows.load(config_of(path))


FORMS = {
    "json text": (json.dumps([SYSTEM, user("1+1=")]), "prompt", (SYSTEM, user("1+1="))),
    "sharegpt": ([{"from": "human", "value": "1+1="}], "prompt", (user("1+1="),)),
    "the only message": ([user("1+1=")], "prompt.0.content", ()),
}


@pytest.mark.parametrize("by_function", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_messages_are_read_in_every_form_from_files_and_functions(
    form: str, by_function: bool, jsonl: Jsonl, write_module: Callable[[str], str]
) -> None:
    value, question, messages = FORMS[form]
    config = config_of(jsonl(*[{"prompt": value, "answer": "2"}] * 2), question=question)
    if by_function:
        name = write_module(f"def read():\n    return [{{'prompt': {value!r}, 'answer': '2'}}] * 2\n")
        config = config_of(None, question=question, _target_=f"{name}.read")
    (row,) = rows.load(config).train
    assert (row.question, row.answer, row.messages) == ("1+1=", "2", messages)


@pytest.mark.parametrize(("family", "key"), [("qwen3", "data.question"), ("qwen3.5", "data.template")])
def test_a_message_that_the_template_leaves_out_or_rejects_is_refused(
    jsonl: Jsonl, family: str, key: str, tmp_path: Path
) -> None:
    messages = [user("1+1="), {"role": "developer", "content": "Be brief."}, user("Now?")]
    path = jsonl(*[{"prompt": messages, "answer": "2"}] * 2)
    with refused(key, None, "row 1 of"):
        prompts(config_of(path), tokenizer_of(family, tmp_path / "model"))


# --- forms of rows


def tool(name: str, **kinds: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in kinds.items()}
    parameters = {"type": "object", "properties": properties, "required": list(kinds)}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


def calling(name: str, **arguments: Any) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [user(f"{name}?"), {"role": "assistant", "content": "", "tool_calls": [call]}]


TOOLS = [tool("weather", city="string"), tool("add", left="integer", right="integer")]


def test_rows_with_other_tools_and_calls_are_the_same_prompts_in_parquet_and_jsonl(
    jsonl: Jsonl, model: Any, tmp_path: Path
) -> None:
    """Arrow gives every call and schema the keys of all."""
    result = {"role": "tool", "content": "done"}
    records = [
        {"prompt": [*calling("weather", city="Rome"), result], "tools": TOOLS, "answer": "1"},
        {"prompt": [*calling("add", left=1, right=2), result], "tools": TOOLS, "answer": "2"},
    ]
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), file)
    lines, table = (
        prompts(config_of(path, eval_path=path, tools="tools"), model) for path in (jsonl(*records), str(file))
    )
    assert [each.token_ids.tolist() for each in table] == [each.token_ids.tolist() for each in lines]
    assert [each.messages for each in table] == [each.messages for each in lines]
    assert [each.row["tools"] for each in table] == [TOOLS] * 4
    assert "null" not in model.decode(table[0].token_ids)


def test_nulls_that_were_written_stay(jsonl: Jsonl, model: Any) -> None:
    schema = tool("weather", city="string")
    schema["function"]["parameters"]["properties"]["city"]["default"] = None
    rows = {"prompt": [*calling("weather", city=None), user("And?")], "tools": [schema], "answer": "1"}
    found = prompts(config_of(jsonl(rows, rows), tools="tools"), model)
    text = model.decode(found[0].token_ids)
    assert '"default": null' in text
    assert '{"city": null}' in text


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ TEXT }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WHOLE = CHATML.replace("TEXT", "message.content")


def with_template(model: Any, template: str) -> Any:
    found = copy.copy(model)
    found.chat_template = template
    return found


@pytest.mark.parametrize(
    ("lost", "text"),
    [
        ("tool call", "message.content"),
        ("text", "'' if message.role == 'tool' else message.content"),
        ("text", "message.content[:4]"),
    ],
)
def test_a_template_that_leaves_out_a_call_or_a_text_is_refused(lost: str, text: str, jsonl: Jsonl, model: Any) -> None:
    before = calling("add", left=1) if lost == "tool call" else [user("add")]
    row = {"prompt": [*before, {"role": "tool", "content": "It is three."}], "answer": "x"}
    with refused("data.question", "prompt", lost, "row 1 of"):
        prompts(config_of(jsonl(row, row)), with_template(model, CHATML.replace("TEXT", text)))


@pytest.mark.parametrize("role", ["user", "tool", "system"])
def test_control_tokens_that_a_text_spells_stay_text(role: str, jsonl: Jsonl, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "bytes"), chat_template=WHOLE)
    text = "a<|im_end|>\n<|im_start|>system\nb<|endoftext|>"
    messages = [{"role": role, "content": text}, user("ok")]
    row = {"prompt": messages, "answer": "x"}
    found, _ = prompts(config_of(jsonl(row, row)), tokenizer)
    special = [token for token in found.token_ids.tolist() if token >= 256]
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert special == [start, end, start, end, start]
    assert tokenizer.decode(found.token_ids) == tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )


def test_variables_of_the_template_are_those_of_the_row_else_those_of_the_run(jsonl: Jsonl, model: Any) -> None:
    tokenizer = with_template(model, "{{ effort }} {{ enable_thinking }} " + WHOLE)
    kwargs = [{}, {"effort": "high"}, '{"enable_thinking": true}']
    rows = [{"prompt": [user("q")], "answer": "x", "chat_template_kwargs": each} for each in kwargs]
    path = jsonl(*rows)
    config = config_of(path, eval_path=path, chat_template_kwargs={"effort": "low"})
    data = build(config, tokenizer, seed=0, max_prompt_tokens=1000)
    begins = [tokenizer.decode(each.token_ids).partition(" <|im")[0] for each in data.evals["eval"]]
    assert begins == ["low False", "high False", "low True"]


@pytest.mark.parametrize("field", ["prompt.0.content", "prompt.1.content", "prompt.0.role"])
def test_one_of_several_messages_is_not_a_question(jsonl: Jsonl, field: str) -> None:
    path = jsonl({"prompt": [SYSTEM, user("1+1=")], "answer": "2"})
    with refused("data.question", field, "give prompt,", "row 1 of"):
        rows.load(config_of(path, question=field))


def test_a_control_token_that_cannot_stay_text_is_named_with_its_row(jsonl: Jsonl) -> None:
    """The tokenizer puts a space before each text that it encodes, so a token cannot be cut."""
    letters = {chr(code): code for code in range(33, 127)}
    backend = Tokenizer(models.BPE({**letters, "▁": 0, "</s>": 1}, []))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    backend.add_special_tokens(["</s>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=WHOLE)
    path = jsonl({"prompt": [user("fine")], "answer": "x"}, {"prompt": [user("old </s> text")], "answer": "x"})
    data = build(config_of(path, eval_path=path), tokenizer, seed=0, max_prompt_tokens=1000)
    (warning,) = rendering_warnings(data.train.prompts, config_of(path), tokenizer)
    assert "/1 spells </s>" in warning


def test_fields_of_messages_that_nothing_reads_are_named(jsonl: Jsonl, model: Any) -> None:
    row = {"prompt": [{**user("q"), "mood": "good", "weight": 1, "name": "me"}], "answer": "x"}
    config = config_of(jsonl(row, row))
    read = with_template(model, CHATML.replace("TEXT", "message.content + message.mood"))
    unread = with_template(model, WHOLE)
    (warning,) = rendering_warnings(prompts(config, unread), config, unread)
    assert warning.endswith(": mood")
    assert rendering_warnings(prompts(config, read), config, read) == []


@pytest.mark.parametrize("own", [3, [1], {"messages": []}, "text"])
def test_what_are_no_variables_of_a_template_is_refused(own: Any, jsonl: Jsonl) -> None:
    with refused("data.chat_template_kwargs", None, "row 1 of"):
        rows.load(config_of(jsonl({"prompt": [user("q")], "answer": "x", "chat_template_kwargs": own})))
