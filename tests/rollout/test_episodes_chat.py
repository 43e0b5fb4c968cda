"""Episodes in a chat format, with the real workers and renderer and scripted completions: whose token is whose."""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.environment.pool import EnvironmentSpec
from app.environment.rendering import renderer_for
from app.environment.tools import load_tools
from app.environment.wire import Limits, RendererChoice
from app.types import Completion, FinishReason, Group, GroupRequest, Prompt, TokenSequence, Trajectory, VersionSpan
from tests.environment.qwen import tokenizer, write_model
from tests.rollout.episodes import group, pieces, rollouter_of

TOOLS = ["tests.mode.chat_environments.search", "tests.mode.chat_environments.Notebook"]
QUESTION = "Where is the lamp?"
END = "<|im_end|>"
CALL = '<tool_call>\n{"name": "search",  "arguments": {"query":   "lamp"}}\n</tool_call>' + END  # odd blanks
OPEN = '<tool_call>\n{"name": "search", "argum'  # cut
NOTE = '<tool_call>\n{"name": "note", "arguments": {"text": "7"}}\n</tool_call>'

ASKS_AGAIN = """
class Env:
    def begin(self, task):
        self.asked = 0
        return task.question
    def step(self, reply):
        self.asked += 1
        return "Are you sure?" if self.asked == 1 else None
    def score(self):
        return 1.0
"""


def ids(text: str) -> list[int]:
    found: list[int] = tokenizer().encode(text, add_special_tokens=False).ids
    return found


def decoded(token_ids: Sequence[int] | np.ndarray) -> str:
    return str(tokenizer().decode(list(token_ids), skip_special_tokens=False))


@dataclass
class Talker:
    """An engine that says, in the n-th turn of each member, the n-th text."""

    script: Sequence[str]
    asked: list[GroupRequest] = field(default_factory=list)

    async def generate(self, request: GroupRequest) -> list[Completion]:
        self.asked.append(request)
        text = self.script[int(request.turn.split()[0]) - 1]
        tokens = np.array(ids(text), dtype=np.int32)
        reason = FinishReason.stop if text.endswith(END) else FinishReason.length
        span = VersionSpan(request.version, 0, len(tokens))
        return [Completion(tokens, np.full(len(tokens), -0.5, dtype=np.float32), reason, (span,))]

    async def abort(self, prompt_ids: Sequence[str] | None = None) -> None: ...


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", "qwen3")


def with_tools(model: Path, **settings: Any) -> EnvironmentSpec:
    environment = {"kind": "tools", "tools": TOOLS, **settings}
    return EnvironmentSpec(
        environment, RendererChoice("chat", str(model), "template"), Limits(5, None, 100, 30.0, 100.0)
    )


def played(spec: EnvironmentSpec, model: Path, *script: str, size: int = 2) -> tuple[Talker, Group]:
    engine = Talker(script)
    question = renderer_for("chat", str(model)).opening([{"role": "user", "content": QUESTION}])
    prompt = Prompt("rooms/0@0", np.array(question, dtype=np.int32), "Room 7", "rooms", QUESTION, {"answer": "Room 7"})

    async def run() -> Group:
        async with rollouter_of(spec, [engine], room=600, max_prompt=512) as rollouter:
            return await group(rollouter, prompt, size=size, room=600)

    return engine, asyncio.run(run())


def sampled_and_not(sequence: TokenSequence) -> tuple[list[str], list[str]]:
    """The texts that were sampled, and those between them."""
    edges = [0, *(edge for piece in pieces(sequence) for edge in piece), len(sequence.token_ids)]
    texts = [decoded(sequence.token_ids[start:end]) for start, end in itertools.pairwise(edges)]
    return texts[1::2], [text for text in texts[0::2] if text]


def test_only_what_the_engine_said_is_marked_and_each_request_is_the_sequence_so_far(model: Path) -> None:
    engine, made = played(with_tools(model), model, CALL, NOTE + NOTE + END, "Room 7" + END)
    schemas = [dict(tool.schema) for tool in load_tools(TOOLS).values()]
    opening = renderer_for("chat", str(model)).opening([{"role": "user", "content": QUESTION}], schemas)
    assert len(made.trajectories) == 2
    assert len(engine.asked) == 6

    for trajectory in made.trajectories:
        (sequence,) = trajectory.sequences
        said, heard = sampled_and_not(sequence)
        assert said == [CALL, NOTE + NOTE + END, "Room 7" + END], "odd blanks survive"
        assert len(sequence.logprobs) == sequence.sampled.sum() == sum(len(ids(text)) for text in said)
        assert sequence.token_ids[: sequence.opening_tokens].tolist() == opening
        assert "<tool_response>\nlamp: room 7\n</tool_response>" in heard[1]
        assert heard[2].count("<tool_response>") == 2
        assert "1 notes" in heard[2]
        assert "2 notes" in heard[2], "one notebook an episode"
        assert trajectory.text == "Room 7"

        begun = {sequence.token_ids[:start].tobytes() for start, _ in pieces(sequence)}
        assert {request.token_ids.tobytes() for request in engine.asked} == begun


def test_what_goes_wrong_in_a_call_is_heard_and_not_sampled(model: Path) -> None:
    unknown = '<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call>' + END
    _, made = played(with_tools(model), model, OPEN, unknown, "I do not know" + END, size=1)
    (trajectory,) = made.trajectories
    (sequence,) = trajectory.sequences
    said, heard = sampled_and_not(sequence)
    assert said == [OPEN, unknown, "I do not know" + END]
    assert heard[1].startswith(END), "the renderer closes a cut reply; that token was not sampled"
    assert "error: the call was not closed" in heard[1]
    assert "error: there is no tool find; the tools are search, note" in heard[2]
    assert trajectory.episode is not None
    assert trajectory.episode.metrics["tool_calls"] == trajectory.episode.metrics["tool_failures"] == 2.0


@pytest.mark.parametrize("thinking", ["template", "keep"])
def test_earlier_reasoning_is_stripped_as_the_template_does_or_kept(model: Path, own: Any, thinking: str) -> None:
    spec = own(ASKS_AGAIN, model=model)
    choice = RendererChoice("chat", str(model), thinking, enable_thinking=True)
    spec = EnvironmentSpec(spec.environment, choice, spec.limits)
    first, last = "<think>\nHm.\n</think>\n\nRoom 7" + END, "<think>\nYes.\n</think>\n\nRoom 7" + END
    engine, made = played(spec, model, first, last, size=1)
    (trajectory,) = made.trajectories
    assert _said(trajectory) == [first, last]
    reopened = decoded(engine.asked[1].token_ids)
    assert ("Hm." in reopened) == (thinking == "keep")
    assert len(trajectory.sequences) == (1 if thinking == "keep" else 2)
    assert "Are you sure?" in reopened
    assert trajectory.sampled_tokens == len(ids(first)) + len(ids(last))


@pytest.mark.parametrize("enabled", [False, True])
def test_data_thinking_reaches_the_generation_prompt(model: Path, own: Any, enabled: bool) -> None:
    spec = own(ASKS_AGAIN, model=model)
    choice = RendererChoice("chat", str(model), "template", enable_thinking=enabled)
    engine, _ = played(EnvironmentSpec(spec.environment, choice, spec.limits), model, *["Room 7" + END] * 2, size=1)
    for request in engine.asked:
        assert decoded(request.token_ids).endswith("<think>\n\n</think>\n\n") is not enabled


def _said(trajectory: Trajectory) -> list[str]:
    return [text for sequence in trajectory.sequences for text in sampled_and_not(sequence)[0]]
