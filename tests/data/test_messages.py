"""A column of chat messages is a prompt: whole, with the model's template, or refused with its row."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from app.config.data import DataConfig, EvalSetConfig, Template
from app.data import rows
from app.data.build import PromptData, build
from app.mode.preflight import problems
from app.types import Prompt
from tests.compose import composed
from tests.environment.qwen import write_model
from tests.refusals import refused

Jsonl = Callable[..., str]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


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
    from transformers import PreTrainedTokenizerFast

    template = (write_model(folder, family) / "chat_template.jinja").read_text()
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), chat_template=template)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tokenizer_of("qwen3", tmp_path_factory.mktemp("model"))


def config_of(path: str, **changes: Any) -> DataConfig:
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
    assert [prompt.token_ids.tolist() for prompt in data.train.take(4)] == expected
    assert [prompt.token_ids.tolist() for prompt in data.evals["eval"]] == expected
    assert "<tool_response>" in model.decode(expected[3])
    assert model.decode(expected[2]).count("<|im_start|>user") == 2


def test_a_reward_gets_the_last_messages_text_and_all_messages(stored: str, model: Any) -> None:
    found = prompts(config_of(stored), model)
    assert [prompt.question for prompt in found] == ["1+1=", "1+2=", "And one more?", "3"]
    assert [list(prompt.messages) for prompt in found] == list(CONVERSATIONS.values())
    assert [len(prompt.row["prompt"]) for prompt in found] == [1, 2, 4, 3]


def test_a_conversation_of_one_message_is_the_prompt_of_its_text(jsonl: Jsonl, model: Any) -> None:
    records = [{"prompt": [user(f"{number}+1=")], "text": f"{number}+1=", "answer": "2"} for number in range(3)]
    path = jsonl(*records)
    frame = {"system": "Add.", "prefix": "Q: ", "suffix": "?"}
    messages = prompts(config_of(path, **frame), model)
    texts = prompts(config_of(path, question="text", **frame), model)
    assert [each.token_ids.tolist() for each in messages] == [each.token_ids.tolist() for each in texts]
    assert messages[0].messages == ({"role": "system", "content": "Add."}, user("Q: 0+1=?"))
    assert texts[0].messages == ()


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
    ([{"role": "human", "content": "q"}], "message 1 is of human"),
    ([user("q"), "q"], "message 2 is of str"),
    ([user("q"), {"content": "q"}], "message 2 is of None"),
    ([{"role": "user"}], "that of message 1 is NoneType"),
    ([{"role": "user", "content": 3}], "that of message 1 is int"),
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


def test_a_tool_may_return_nothing(jsonl: Jsonl) -> None:
    path = jsonl({"prompt": [user("q"), {"role": "tool", "content": ""}], "answer": "a"})
    (row,) = rows.load(config_of(path, eval_path=path)).train
    assert row.question == ""


def test_parts_of_text_are_joined(jsonl: Jsonl, model: Any) -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "1="}]}
    found = prompts(config_of(jsonl(*[{"prompt": [parts], "answer": "2"}] * 2)), model)
    assert found[0].messages == (user("1+1="),)


@pytest.mark.parametrize("field", ["prompt.0.content", "prompt.1.content", "prompt.0.role"])
def test_one_of_several_messages_is_not_a_question(jsonl: Jsonl, field: str) -> None:
    path = jsonl({"prompt": [SYSTEM, user("1+1=")], "answer": "2"})
    with refused("data.question", field, "give prompt,", "row 1 of"):
        rows.load(config_of(path, question=field))


def test_the_only_message_is_a_question(jsonl: Jsonl) -> None:
    path = jsonl(*[{"prompt": [user(f"{n}+1=")], "chat": [user("x"), user("y")], "answer": "2"} for n in range(2)])
    config = config_of(path, question="prompt.0.content", answer="chat.1.content")
    assert [(row.question, row.answer) for row in rows.load(config).train] == [("0+1=", "y")]


def test_messages_need_the_chat_template(jsonl: Jsonl, model: Any) -> None:
    path = jsonl(*[{"prompt": [user("1+1=")], "answer": "2"}] * 2)
    with refused("data.template", "plain", "chat", "row 1 of"):
        prompts(config_of(path, template=Template.plain), model)


def test_messages_are_checked_and_a_reward_is_tried_on_them_before_a_run(jsonl: Jsonl) -> None:
    path = jsonl(*[{"prompt": [SYSTEM, user("1+1=")], "answer": "2"}] * 2)
    line = [f"data.path={path}", "data.question=prompt", "data.template=chat"]
    assert problems(composed(*line, "reward._target_=tests.reward.broken.reads_messages")) == {}
    for wrong in ("data.template=plain", "data.system=Add."):
        assert wrong in problems(composed(*line, wrong))["data"]


@pytest.mark.parametrize(("family", "key"), [("qwen3", "data.question"), ("qwen3.5", "data.template")])
def test_a_message_that_the_template_leaves_out_or_rejects_is_refused(
    jsonl: Jsonl, family: str, key: str, tmp_path: Path
) -> None:
    messages = [user("1+1="), {"role": "developer", "content": "Be brief."}, user("Now?")]
    path = jsonl(*[{"prompt": messages, "answer": "2"}] * 2)
    with refused(key, None, "row 1 of"):
        prompts(config_of(path), tokenizer_of(family, tmp_path / "model"))


def test_conversations_are_the_same_if_all_of_their_messages_are(jsonl: Jsonl) -> None:
    last = user("And now?")
    first, second = ([user(text), {"role": "assistant", "content": "2"}, last] for text in ("1+1=", "3-1="))
    train = jsonl(*[{"prompt": each, "answer": "2"} for each in (first, first)])
    other = jsonl({"prompt": second, "answer": "2"}, name="other.jsonl")
    alone = jsonl({"prompt": [last], "answer": "2"}, name="alone.jsonl")

    def overlaps(**sets: str) -> int:
        evaluated = {name: EvalSetConfig(path=path) for name, path in sets.items()}
        loaded = rows.load(config_of(train, distinct=True, eval_sets=evaluated))
        assert len(loaded.train) == 1
        return len(loaded.warnings)

    assert overlaps(other=other, alone=alone) == 0
    assert overlaps(same=train) == 1


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_column_of_images_is_said_to_be_unused(jsonl: Jsonl, tmp_path: Path, kind: str) -> None:
    record = {"prompt": [user("What is on it?")], "answer": "2"}
    path = jsonl(*[{**record, "images": ["a.png"]}] * 3)
    if kind == "parquet":
        path = str(tmp_path / "rows.parquet")
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{**record, "images": [{"bytes": b"PNG"}]}] * 3), path)
    (warning,) = [each for each in rows.load(config_of(path)).warnings if "not used" in each]
    assert path in warning
    assert "images" in warning


def test_rows_without_an_answer_need_a_reward_of_ones_own(jsonl: Jsonl) -> None:
    path = jsonl(*[{"prompt": [user("1+1=")]}] * 2)
    assert rows.load(config_of(path, answer=None)).train[0].answer == ""

    line = ["model=hf", "model.path=me/model", "data=rows", f"data.path={path}", "data.answer=null"]
    with refused("data.answer", "null", "a field of the rows"):
        composed(*line, "reward=math")
    composed(*line, "environment._target_=my_envs.Guess", "reward=environment")
    composed(*line, "reward._target_=my_rewards.brief")
    with refused("data.answer_after"):
        composed(*line, "reward._target_=my_rewards.brief", "data.answer_after=x")


def test_messages_of_a_function_are_those_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Any
) -> None:
    (tmp_path / "my_conversations.py").write_text(
        f"def read():\n    return [{{'prompt': each, 'answer': '2'}} for each in {list(CONVERSATIONS.values())!r}]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = DataConfig(_target_="my_conversations.read", question="prompt", template=Template.chat)
    found = prompts(config, model)
    assert json.dumps([list(prompt.messages) for prompt in found]) == json.dumps(list(CONVERSATIONS.values()))
