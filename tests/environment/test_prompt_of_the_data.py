"""`begin` that returns None and `policy(None)`: the data set's prompt stays in front of every history."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from app.environment.protocol import Message
from app.environment.rendering import renderer_for
from app.environment.wire import Answer, SampleRequest
from app.environment.worker.episode import opening_of
from tests.environment.pools import PATIENCE_S, Maker, a_task, running_pool
from tests.environment.qwen import by_transformers, decoded, user, write_model
from tests.environment.talker import Talker
from tests.tiny_models.tokenizer import build_tokenizer

END = "<|im_end|>"
QUESTION = "I think of a number from 1 to 100."
FRAMING = {"system": "You are a player.", "prefix": "Task: ", "suffix": " Reply with a number only."}
DATA = opening_of(a_task(question=QUESTION), FRAMING)
THOUGHTS = ("let me see", "hm", "ok", "so", "well")
REPLIES = ("50", "75", "62", "68", "65")
Model = tuple[str, Path]  # family and directory


@pytest.fixture(scope="module", params=["qwen3", "qwen3.5"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return request.param, write_model(tmp_path_factory.mktemp("model"), request.param)


def text_by_transformers(folder: Path, messages: Sequence[Message]) -> str:
    return decoded(by_transformers(folder, messages))


def thought(family: str, number: int) -> str:
    """A reply as it is sampled; Qwen3.5's generation prompt has opened the reasoning."""
    opened = "<think>\n" if family == "qwen3" else ""
    return f"{opened}{THOUGHTS[number]}\n</think>\n\n{REPLIES[number]}{END}"


@pytest.mark.parametrize("thinking", ["template", "keep"])
async def test_a_history_begins_with_the_prompt_whether_the_template_rewrites_it_or_its_reasoning_is_kept(
    model: Model, thinking: str
) -> None:
    family, path = model
    script = [thought(family, number) for number in range(len(REPLIES))]
    renderer = renderer_for("chat", str(path), thinking, True)
    talker = Talker(renderer, *script, opening=DATA, prompt=by_transformers(path, DATA))
    history: list[Message] = []
    reply = await talker.policy(None)
    for said in ("higher", "lower", "higher"):
        history += [reply.message, user(said)]
        reply = await talker.policy(history)

    if thinking == "template":
        assert talker.requests == [
            (turn, text_by_transformers(path, [*DATA, *history[: 2 * turn]])) for turn in range(4)
        ]
        return
    empty = text_by_transformers(path, [user("")])
    generation = empty[empty.rindex("<|im_start|>") :]
    expected = [text_by_transformers(path, DATA)]
    for turn, said in enumerate(["higher", "lower", "higher"]):
        expected.append(f"{expected[-1]}{thought(family, turn)}\n<|im_start|>user\n{said}{END}\n{generation}")
    assert talker.requests == [(0, text) for text in expected]


PLAIN_AGENT = """
class Env:
    async def run(self, task, policy):
        first = await policy(None)
        history = [first.message, {"role": "user", "content": "7"}, {"role": "assistant", "content": "8"}]
        await policy([*history, {"role": "user", "content": "9"}])  # a message of the policy that it did not say
        return 1.0
"""


async def test_plain_text_begins_with_the_prompt_as_the_workers_settings_frame_it(own: Maker, tmp_path: Path) -> None:
    letters = build_tokenizer(256)
    letters.save_pretrained(tmp_path / "tiny")
    spec = own(PLAIN_AGENT, model=tmp_path / "tiny")
    spec = replace(spec, environment={**spec.environment, "prefix": "1", "suffix": "="})

    contexts = []
    async with running_pool(spec) as pool:
        session = await pool.begin(a_task(question="2+3"), letters.encode("12+3="))
        while isinstance(event := await asyncio.wait_for(session.next(), PATIENCE_S), SampleRequest):
            contexts.append(letters.decode(event.context, skip_special_tokens=True))
            session.reply(event, Answer(event.number, letters.encode("5", add_special_tokens=False), "stop"))
    assert contexts == ["12+3=", "12+3=5789"]
