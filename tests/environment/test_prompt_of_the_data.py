"""`begin` that returns None and `policy(None)`: the data set's prompt stays in front, however the history is rendered.

A real worker with Qwen's templates; what an engine is sent is compared with transformers' rendering of all messages.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from app.environment.pool import EnvironmentPool, EnvironmentSpec
from app.environment.wire import End, Limits, RendererChoice, SampleRequest
from app.worker.wire import Failed
from tests.environment.pools import PATIENCE_S, a_task, environment_module, running_pool
from tests.environment.qwen import tokenizer, write_model
from tests.tiny_models.tokenizer import build_tokenizer

END = "<|im_end|>"
QUESTION = "I think of a number from 1 to 100."
FRAMING = {"system": "You are a player.", "prefix": "Task: ", "suffix": " Reply with a number only."}
FRAMES: list[dict[str, Any]] = [{}, FRAMING]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
THOUGHTS = ("let me see", "hm", "ok", "so")
REPLIES = ("50", "75", "62", "68")

GUESS = """
class Env:
    def begin(self, task):
        self.said = iter(["higher", "lower", "higher"])
    def step(self, reply):
        return next(self.said, None)
    def score(self):
        return 1.0
"""
AGENT = f"""
TOOL = {TOOL!r}
def user(text):
    return {{"role": "user", "content": text}}
class Env:
    async def run(self, task, policy):
        await getattr(self, task.row["story"])(policy)
        return 1.0
    async def helpers(self, policy):
        first = await policy(None)
        draft = await policy([user("Check it.")])
        await policy([user("Check it."), draft.message, user("Sure?")])
        await policy([{{"role": "assistant", "content": "Hello."}}, user("Check it.")])
        await policy([first.message, user("Go on.")])
    async def tools(self, policy):
        first = await policy(None, tools=[TOOL])
        await policy([first.message, user("Go on.")], tools=[TOOL])
        await policy([first.message, user("Now without.")])
    async def samples(self, policy):
        for reply in [await policy(None), await policy(None)]:
            await policy([reply.message, user("Go on.")])
"""


def ids(text: str) -> list[int]:
    found: list[int] = tokenizer().encode(text, add_special_tokens=False).ids
    return found


def decoded(token_ids: Sequence[int]) -> str:
    return str(tokenizer().decode(list(token_ids), skip_special_tokens=False))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def replied(number: int) -> dict[str, Any]:
    return {"role": "assistant", "content": REPLIES[number % 4], "reasoning_content": THOUGHTS[number % 4]}


def of_the_data(frame: dict[str, str]) -> list[dict[str, Any]]:
    question = user(frame.get("prefix", "") + QUESTION + frame.get("suffix", ""))
    return [{"role": "system", "content": frame["system"]}, question] if "system" in frame else [question]


@pytest.fixture(scope="module", params=["qwen3", "qwen3.5"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, write_model(tmp_path_factory.mktemp("model"), request.param)


def by_transformers(folder: Path, messages: Sequence[dict[str, Any]], tools: Any = None) -> str:
    from transformers import PreTrainedTokenizerFast

    template = (folder / "chat_template.jinja").read_text()
    reference = PreTrainedTokenizerFast(tokenizer_object=tokenizer(), chat_template=template)
    text: str = reference.apply_chat_template(
        list(messages), tools=tools, tokenize=False, add_generation_prompt=True, enable_thinking=True
    )
    return text


def thought(family: str, number: int) -> str:
    """A reply as it is sampled; Qwen3.5's generation prompt has opened the reasoning."""
    opened = "<think>\n" if family == "qwen3" else ""
    return f"{opened}{THOUGHTS[number % 4]}\n</think>\n\n{REPLIES[number % 4]}{END}"


def requests(
    spec: EnvironmentSpec, model: tuple[str, Path], prompt: str, *stories: str, messages: Sequence[dict[str, Any]] = ()
) -> list[list[tuple[int, str]]]:
    """Play an episode of each story with one worker; the sequence and the whole text of each request."""

    async def play(pool: EnvironmentPool, story: str) -> list[tuple[int, str]]:
        sequences: dict[int, list[int]] = {}
        sent: list[tuple[int, str]] = []
        session = await pool.begin(a_task(question=QUESTION, row={"story": story}, messages=messages), ids(prompt))
        while isinstance(event := await asyncio.wait_for(session.next(), PATIENCE_S), SampleRequest):
            sequence = sequences.setdefault(event.sequence, [])
            sequence += event.append
            said = ids(thought(model[0], len(sent)))
            sent.append((event.sequence, decoded(sequence)))
            sequence += said
            session.answer(event, said, "stop")
        assert isinstance(event, End), event.text if isinstance(event, Failed) else event
        return sent

    async def run() -> list[list[tuple[int, str]]]:
        async with running_pool(spec) as pool:
            return [await play(pool, story) for story in stories]

    return asyncio.run(run())


def spec_of(
    folder: Path, source: str, model: tuple[str, Path], frame: dict[str, str], thinking: str = "template"
) -> EnvironmentSpec:
    target = f"{environment_module(folder, source, characters=False)}.Env"
    environment = {"kind": "own", "target": target, "args": {}, **frame}
    renderer = RendererChoice("plain" if model[0] == "plain" else "chat", str(model[1]), thinking, enable_thinking=True)
    return EnvironmentSpec(environment, renderer, Limits(9, None, 100, 30.0, 100.0))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("frame", FRAMES)
def test_a_history_that_the_template_rewrites_begins_with_the_prompt_of_the_data(
    folder: Path, model: tuple[str, Path], frame: dict[str, str]
) -> None:
    path = model[1]
    conversation = of_the_data(frame)
    (sent,) = requests(spec_of(folder, GUESS, model, frame), model, by_transformers(path, conversation), "")

    expected = []
    for turn, said in enumerate(["higher", "lower", "higher", ""]):
        expected.append((turn, by_transformers(path, conversation)))
        conversation = [*conversation, replied(turn), user(said)]
    assert sent == expected


def test_a_history_whose_reasoning_is_kept_is_one_sequence_that_begins_with_the_prompt(
    folder: Path, model: tuple[str, Path]
) -> None:
    family, path = model
    prompt = by_transformers(path, of_the_data(FRAMING))
    (sent,) = requests(spec_of(folder, GUESS, model, FRAMING, "keep"), model, prompt, "")

    empty = by_transformers(path, [user("")])
    generation = empty[empty.rindex("<|im_start|>") :]
    expected = [prompt]
    for turn, said in enumerate(["higher", "lower", "higher"]):
        expected.append(f"{expected[-1]}{thought(family, turn)}\n<|im_start|>user\n{said}{END}\n{generation}")
    assert sent == [(0, text) for text in expected]


def test_a_conversation_of_the_data_stands_before_an_episode_whole(folder: Path, model: tuple[str, Path]) -> None:
    path = model[1]
    conversation = [
        {"role": "system", "content": "You are a player."},
        user("Do you know the game?"),
        {"role": "assistant", "content": "Yes."},
        user(QUESTION),
    ]
    prompt = by_transformers(path, conversation)
    spec = spec_of(folder, AGENT, model, FRAMING)  # which the driver has put around the messages before
    (sent,) = requests(spec, model, prompt, "tools", messages=conversation)
    assert [text for _, text in sent] == [
        by_transformers(path, conversation, [TOOL]),
        by_transformers(path, [*conversation, replied(0), user("Go on.")], [TOOL]),
        by_transformers(path, [*conversation, replied(0), user("Now without.")]),
    ]


def test_agents_that_ask_with_the_prompt_of_the_data(folder: Path, model: tuple[str, Path]) -> None:
    path = model[1]
    data = of_the_data(FRAMING)
    played = requests(
        spec_of(folder, AGENT, model, FRAMING), model, by_transformers(path, data), "helpers", "tools", "samples"
    )
    helpers, tools, samples = ([text for _, text in sent] for sent in played)

    assert helpers == [
        by_transformers(path, conversation)
        for conversation in (
            data,
            [user("Check it.")],  # a helper reads its own messages alone
            [user("Check it."), replied(1), user("Sure?")],
            [{"role": "assistant", "content": "Hello."}, user("Check it.")],
            [*data, replied(0), user("Go on.")],
        )
    ]
    assert tools == [
        by_transformers(path, data, [TOOL]),
        by_transformers(path, [*data, replied(0), user("Go on.")], [TOOL]),
        by_transformers(path, [*data, replied(0), user("Now without.")]),
    ]
    assert samples[2:] == [by_transformers(path, [*data, replied(number), user("Go on.")]) for number in (0, 1)]


PLAIN_AGENT = """
class Env:
    async def run(self, task, policy):
        first = await policy(None)
        history = [first.message, {"role": "user", "content": "7"}, {"role": "assistant", "content": "8"}]
        await policy([*history, {"role": "user", "content": "9"}])  # a message of the policy that it did not say
        return 1.0
"""


async def test_plain_text_begins_with_the_prompt_of_the_data_too(folder: Path) -> None:
    letters = build_tokenizer(256)
    letters.save_pretrained(folder / "tiny")
    target = f"{environment_module(folder, PLAIN_AGENT, characters=False)}.Env"
    environment = {"kind": "own", "target": target, "args": {}, "prefix": "1", "suffix": "="}
    renderer = RendererChoice("plain", str(folder / "tiny"), "template")
    spec = EnvironmentSpec(environment, renderer, Limits(9, None, 100, 30.0, 100.0))

    appended = []
    async with running_pool(spec) as pool:
        session = await pool.begin(a_task(question="2+3"), letters.encode("12+3="))
        while isinstance(event := await asyncio.wait_for(session.next(), PATIENCE_S), SampleRequest):
            appended.append(letters.decode(event.append, skip_special_tokens=True))
            session.answer(event, letters.encode("5", add_special_tokens=False), "stop")
    assert appended == ["12+3=", "12+3=5789"]
