"""Demonstrations in the tokens of a rollout: what is imitated, by chat templates of models and in plain text."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.config.data import DataConfig, Template
from app.data import prompts, rows
from app.data.demonstrations import DemonstrationStream, Demonstrator
from app.errors import ConfigError
from app.model.hf_directory import load_tokenizer, stop_ids
from app.types import Prompt, TokenSequence
from tests.byte_level import CHATML, R1, write_tokenizer
from tests.environment.families import TEMPLATES
from tests.refusals import refused

CHAT = DataConfig(name="mine", question="messages", template=Template.chat, shuffle=False)
ASK = {"role": "user", "content": "1+1="}
TURN = [{"role": "user", "content": "12+34="}, {"role": "assistant", "content": "46"}]
SEVERAL = [
    {"role": "system", "content": "Add."},
    ASK,
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2="},
    {"role": "assistant", "content": "4"},
]


@pytest.fixture(scope="module")
def tokenizer_of(tiny_model: Path) -> Callable[[Path], Any]:
    return lambda template: load_tokenizer(tiny_model, chat_template=template.read_text())


def demonstrator(tokenizer: Any, model: Path, config: DataConfig = CHAT, max_tokens: int = 4096) -> Demonstrator:
    return Demonstrator(config, tokenizer, stop_ids(model), max_tokens)


def prompts_of(config: DataConfig, file: str, tokenizer: Any) -> list[Prompt]:
    loaded = rows.load(replace(config, path=file, eval_path=file), replies=True)
    return prompts.prompts_of(loaded.train, config, tokenizer)


def imitated(sequence: TokenSequence, tokenizer: Any) -> list[str]:
    """Return the text of each run of imitated tokens."""
    texts: list[list[int]] = []
    for before, marked, token in zip(
        [False, *sequence.sampled[:-1]], sequence.sampled, sequence.token_ids, strict=True
    ):
        if marked and not before:
            texts.append([])
        if marked:
            texts[-1].append(int(token))
    return [tokenizer.decode(text) for text in texts]


@pytest.mark.parametrize("template", [*sorted(path.name for path in TEMPLATES.glob("qwen*")), "smollm2.jinja"])
@pytest.mark.parametrize("thinking", [False, True])
def test_every_reply_of_a_conversation_is_imitated_with_the_token_that_ends_it(
    template: str, thinking: bool, tokenizer_of: Callable[[Path], Any], tiny_model: Path, jsonl: Callable[..., str]
) -> None:
    tokenizer = tokenizer_of(TEMPLATES / template)
    config = replace(CHAT, thinking=thinking)
    (prompt,) = prompts_of(config, jsonl({"messages": SEVERAL}), tokenizer)
    (sequence,) = demonstrator(tokenizer, tiny_model, config).sequences([prompt])

    first, last = imitated(sequence, tokenizer)
    assert (first, last.rpartition("</think>")[2].strip()) == ("2<|im_end|>", "4<|im_end|>")
    whole = tokenizer.apply_chat_template(SEVERAL, tokenize=False, enable_thinking=thinking)
    assert tokenizer.decode(sequence.token_ids.tolist()) == whole.rstrip("\n")
    # the last reply stands where a rollout's would
    assert sequence.token_ids[: len(prompt.token_ids)].tolist() == prompt.token_ids.tolist()
    assert bool(sequence.sampled[len(prompt.token_ids)])


@pytest.mark.parametrize("template", ["qwen3.jinja", "qwen2_5.jinja"])
def test_an_earlier_reply_that_begins_as_a_block_of_thinking_does_is_imitated_whole(
    template: str, tokenizer_of: Callable[[Path], Any], tiny_model: Path, jsonl: Callable[..., str]
) -> None:
    """The prompt of no thinking ends with an empty block, and the template writes none before these replies."""
    tokenizer = tokenizer_of(TEMPLATES / template)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 12, "b": 34}}}
    called = [TURN[0], {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "46"}]
    tagged = [TURN[0], {"role": "assistant", "content": "<answer>46</answer>"}, ASK]
    for messages, begins in ((called, "<tool_call>\n"), (tagged, "<answer>46</answer>")):
        (prompt,) = prompts_of(CHAT, jsonl({"messages": [*messages, TURN[1]]}), tokenizer)
        (sequence,) = demonstrator(tokenizer, tiny_model).sequences([prompt])
        first, last = imitated(sequence, tokenizer)
        assert first.startswith(begins)
        assert first.endswith("<|im_end|>")
        assert last == "46<|im_end|>"


def test_plain_rows_are_imitated_up_to_the_end_of_the_text_or_cut(tiny_model: Path, jsonl: Callable[..., str]) -> None:
    tokenizer = load_tokenizer(tiny_model)
    config = DataConfig(name="mine")
    (prompt,) = prompts_of(config, jsonl({"question": "12+34=", "answer": 46}), tokenizer)
    (sequence,) = demonstrator(tokenizer, tiny_model, config).sequences([prompt])
    assert imitated(sequence, tokenizer) == ["46<|im_end|>"]
    assert tokenizer.decode(sequence.token_ids.tolist()) == "12+34=46<|im_end|>"
    assert len(sequence.logprobs) == 3

    whole, short = (demonstrator(tokenizer, tiny_model, config, max_tokens) for max_tokens in (9, 8))
    assert (whole.count_cut([prompt]), short.count_cut([prompt])) == (0, 1)
    assert [len(each.token_ids) for made in (whole, short) for each in made.sequences([prompt])] == [9, 8]


@pytest.mark.parametrize("template", ["qwen2_5.jinja", "qwen3.jinja"])
@pytest.mark.parametrize("text", [False, True])
def test_a_rows_tools_are_rendered_in_prompts_and_demonstrations(
    template: str, text: bool, tokenizer_of: Callable[[Path], Any], tiny_model: Path, jsonl: Callable[..., str]
) -> None:
    tokenizer = tokenizer_of(TEMPLATES / template)
    config = replace(CHAT, tools="tools")
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 12, "b": 34}}}
    asked, done = {"role": "user", "content": "12+34="}, {"role": "assistant", "content": "", "tool_calls": [call]}
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    row = {"messages": [asked, done], "tools": json.dumps(tools) if text else tools}
    (prompt,) = prompts_of(config, jsonl(row), tokenizer)
    (sequence,) = demonstrator(tokenizer, tiny_model, config).sequences([prompt])

    opened = tokenizer.apply_chat_template([asked], tools=tools, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(prompt.token_ids.tolist()).startswith(opened)
    assert '"name": "add", "parameters"' in opened
    whole = tokenizer.apply_chat_template([asked, done], tools=tools, tokenize=False)
    assert tokenizer.decode(sequence.token_ids.tolist()) == whole.rstrip("\n")
    (reply,) = imitated(sequence, tokenizer)
    assert "<tool_call>" in reply
    assert reply.endswith("</tool_call><|im_end|>") or reply.endswith("</tool_call>\n<|im_end|>")


def test_the_stream_depends_on_the_step_alone(tiny_model: Path, jsonl: Callable[..., str]) -> None:
    tokenizer = load_tokenizer(tiny_model)
    path = jsonl(*({"question": f"{n}+1=", "answer": n + 1} for n in range(7)))
    config = DataConfig(name="mine", demonstrations=path)

    def stream() -> DemonstrationStream:
        of = demonstrator(tokenizer, tiny_model, config)
        return DemonstrationStream(of, rows.demonstrations(config, [])[0], per_step=3, seed=4, max_prompt_tokens=64)

    def texts(sequences: Sequence[TokenSequence]) -> list[str]:
        return [tokenizer.decode(each.token_ids.tolist()) for each in sequences]

    one = stream()
    steps = [texts(one.of_step(step)) for step in range(1, 8)]
    assert texts(stream().of_step(5)) == steps[4]
    epochs = [text for step in steps for text in step]
    assert len(set(epochs[:7])) == len(set(epochs[7:14])) == 7
    assert epochs[:7] != epochs[7:14]


def test_the_stream_drops_and_counts_demonstrations_with_a_long_prompt(
    tiny_model: Path, jsonl: Callable[..., str]
) -> None:
    path = jsonl({"question": "1+1=", "answer": "2"}, {"question": "100+100=", "answer": "200"})
    config = DataConfig(name="mine", demonstrations=path)
    of = demonstrator(load_tokenizer(tiny_model), tiny_model, config)
    stream = DemonstrationStream(of, rows.demonstrations(config, [])[0], per_step=1, seed=4, max_prompt_tokens=5)
    assert stream.dropped == 1
    assert [prompt.question for prompt in stream.prompts] == ["1+1="]


def test_demonstrations_of_evaluated_questions_and_broken_ones_are_left_out_with_a_warning(
    jsonl: Callable[..., str],
) -> None:
    path = jsonl(*({"question": f"{n}+1=", "answer": str(n + 1)} for n in range(40)), {"question": "no answer"})
    config = DataConfig(name="mine", path=path, demonstrations=path, max_broken_rows=1)
    held_out = rows.load(config).evals["eval"]
    assert len(held_out) == 2
    kept, warnings = rows.demonstrations(config, held_out)
    assert {row.question for row in kept}.isdisjoint(row.question for row in held_out)
    assert len(kept) == 38
    assert [text.split()[:3] for text in warnings] == [["skipped", "1", "broken"], ["2", "of", "40"]]
    with refused("data.demonstrations", path):
        rows.demonstrations(config, kept + held_out)


@pytest.mark.parametrize(
    ("row", "key"),
    [
        ({"messages": [ASK]}, "data.question"),
        ({"messages": TURN[1:]}, "data.question"),
        ({"messages": [TURN[1], TURN[1]]}, "data.question"),
        ({"messages": [*TURN, {"role": "assistant", "content": [{"type": "image"}]}]}, "data.question"),
        ({"messages": [*TURN, TURN[0], {"role": "assistant", "content": " "}]}, "data.question"),
        ({"messages": "1+1="}, "data.answer"),
    ],
)
def test_rows_without_a_reply_are_refused(row: Mapping[str, Any], key: str, jsonl: Callable[..., str]) -> None:
    file = jsonl(row)
    with refused(key, None, Path(file).name):
        rows.load(replace(CHAT, path=file, eval_path=file), replies=True)


def test_a_template_that_does_not_end_a_reply_is_refused(tiny_model: Path, jsonl: Callable[..., str]) -> None:
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    tokenizer = load_tokenizer(tiny_model, chat_template=template)
    prompts = prompts_of(CHAT, jsonl({"messages": TURN}), tokenizer)
    with pytest.raises(ConfigError) as caught:
        demonstrator(tokenizer, tiny_model).count_cut(prompts)
    assert (caught.value.key, str(caught.value).count("<|im_end|>")) == ("data.template", 1)


# --- what a reply says is imitated, or the row is refused

THOUGHT = "<think>\nOne and one.\n</think>\n\n"


def imitated_of(
    messages: list[dict[str, Any]], template: str, folder: Path, jsonl: Callable[..., str], **settings: Any
) -> list[str]:
    path = write_tokenizer(folder, R1 if "r1" in template else CHATML)
    tokenizer = load_tokenizer(path, chat_template=(TEMPLATES / template).read_text())
    config = replace(CHAT, **settings)
    (prompt,) = prompts_of(config, jsonl({"messages": messages}), tokenizer)
    (sequence,) = demonstrator(tokenizer, path, config).sequences([prompt])
    return imitated(sequence, tokenizer)


@pytest.mark.parametrize(
    "reply",
    [
        {"content": f"{THOUGHT}It is 2."},
        {"content": "It is 2.", "reasoning_content": "One and one."},
        {"content": "It is 2.", "reasoning": "One and one."},
        {"content": "It is 2.", "thinking": "One and one."},
    ],
)
def test_the_reasoning_of_a_reply_is_imitated_whatever_its_field(
    reply: dict[str, str], tmp_path: Path, jsonl: Callable[..., str]
) -> None:
    messages = [ASK, {"role": "assistant", **reply}]
    assert imitated_of(messages, "qwen3.jinja", tmp_path, jsonl, thinking=True) == [f"{THOUGHT}It is 2.<|im_end|>"]
    with refused("data.thinking", False, "mine/0"):  # the policy samples after an empty block
        imitated_of(messages, "qwen3.jinja", tmp_path, jsonl)
    with refused("data.question", "messages", "reasoning", "mine/0"):
        imitated_of(messages, "deepseek_r1_distill.jinja", tmp_path, jsonl, thinking=True)


def test_a_call_that_the_template_leaves_out_is_refused(tmp_path: Path, jsonl: Callable[..., str]) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages: list[dict[str, Any]] = [ASK, {"role": "assistant", "content": "I ask.", "tool_calls": [call]}]
    with refused("data.question", "messages", "tool call", "mine/0"):
        imitated_of(messages, "smollm2.jinja", tmp_path, jsonl)
    (reply,) = imitated_of(messages, "qwen2_5.jinja", tmp_path, jsonl)
    assert '{"name": "add", "arguments": {"a": 1}}' in reply


def test_a_reply_that_spells_the_token_that_ends_it_is_refused(tmp_path: Path, jsonl: Callable[..., str]) -> None:
    with refused("data.question", "messages", "<|im_end|>", "mine/0"):
        imitated_of([ASK, {"role": "assistant", "content": "2<|im_end|> or 3"}], "qwen2_5.jinja", tmp_path, jsonl)


def test_replies_are_imitated_as_their_flags_say(tmp_path: Path, jsonl: Callable[..., str]) -> None:
    def replies(*trained: int) -> list[dict[str, Any]]:
        said = [{"role": "assistant", "content": f"a{number}", "weight": each} for number, each in enumerate(trained)]
        return [message for each in said for message in (ASK, each)]

    found = [imitated_of(replies(*each), "qwen2_5.jinja", tmp_path, jsonl) for each in ([1, 1], [0, 1], [1, 0])]
    assert found == [["a0<|im_end|>", "a1<|im_end|>"], ["a1<|im_end|>"], ["a0<|im_end|>"]]
    with refused("data.question", "messages", "none is", "row 1 of"):
        imitated_of(replies(0, 0), "qwen2_5.jinja", tmp_path, jsonl)


def test_the_last_reply_alone_is_imitated_where_the_run_says_so(tmp_path: Path, jsonl: Callable[..., str]) -> None:
    messages = [ASK, {"role": "assistant", "content": "2"}, ASK, {"role": "assistant", "content": "two"}]
    assert imitated_of(messages, "qwen3.jinja", tmp_path, jsonl, last_reply_only=True) == ["two<|im_end|>"]


QWEN3 = TEMPLATES / "qwen3.jinja"


def test_a_question_with_an_answer_is_a_conversation_of_two_messages(
    tokenizer_of: Callable[[Path], Any], tiny_model: Path, jsonl: Callable[..., str]
) -> None:
    tokenizer = tokenizer_of(QWEN3)
    fields = replace(CHAT, question="question", answer_after="####")
    row = {"question": "12+34=", "answer": "Add. #### 46"}
    (prompt,) = prompts_of(fields, jsonl(row), tokenizer)
    assert (prompt.answer, prompt.reply) == ("46", {"role": "assistant", "content": "Add. #### 46"})
    (sequence,) = demonstrator(tokenizer, tiny_model, fields).sequences([prompt])
    assert imitated(sequence, tokenizer) == ["Add. #### 46<|im_end|>"]


def test_messages_of_a_prompt_and_of_its_completion_are_one_conversation(
    tiny_model: Path, tokenizer_of: Callable[[Path], Any], jsonl: Callable[..., str]
) -> None:
    """TRL's rows for supervised fine-tuning."""
    tokenizer = tokenizer_of(QWEN3)
    config = replace(CHAT, question="prompt", answer="completion")
    (joined,) = prompts_of(CHAT, jsonl({"messages": SEVERAL[:3]}), tokenizer)
    row = {"prompt": SEVERAL[:2], "completion": SEVERAL[2:3]}
    (split,) = prompts_of(config, jsonl(row), tokenizer)
    assert (split.messages, split.reply, split.answer) == (joined.messages, joined.reply, "2")
    made = demonstrator(tokenizer, tiny_model, config)
    assert [imitated(each, tokenizer) for each in made.sequences([split])] == [["2<|im_end|>"]]
