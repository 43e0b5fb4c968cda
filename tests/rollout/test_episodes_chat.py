"""Episodes in a chat format, with the real workers and renderer and scripted completions: whose token is whose."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from app.environment.pool import EnvironmentSpec
from app.environment.rendering import renderer_for
from app.environment.tools import load_tools
from app.environment.wire import Limits, RendererChoice
from app.types import Completion, FinishReason, GroupRequest, Prompt, TokenSequence, VersionSpan
from tests.environment.qwen import decoded, ids, user, write_model
from tests.rollout.episodes import group, pieces, rollouter_of

TOOLS = ["tests.mode.chat_environments.search", "tests.mode.chat_environments.Notebook"]
QUESTION = "Where is the lamp?"
END = "<|im_end|>"
CALL = '<tool_call>\n{"name": "search",  "arguments": {"query":   "lamp"}}\n</tool_call>' + END  # odd blanks
CUT = '<tool_call>\n{"name": "search", "argum'
NOTE = '<tool_call>\n{"name": "note", "arguments": {"text": "7"}}\n</tool_call>'


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


def sampled_and_not(sequence: TokenSequence) -> tuple[list[str], list[str]]:
    """The texts that were sampled, and those between them."""
    edges = [0, *(edge for piece in pieces(sequence) for edge in piece), len(sequence.token_ids)]
    texts = [decoded(sequence.token_ids[start:end]) for start, end in itertools.pairwise(edges)]
    return texts[1::2], [text for text in texts[0::2] if text]


async def test_only_what_the_engine_said_is_marked_and_each_request_is_the_sequence_so_far(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "qwen3")
    choice = RendererChoice("chat", str(model), "template")
    spec = EnvironmentSpec({"kind": "tools", "tools": TOOLS}, choice, Limits(5, None, 100, 30.0, 100.0))
    renderer = renderer_for("chat", str(model))
    question = np.array(renderer.opening([user(QUESTION)]), dtype=np.int32)
    prompt = Prompt("rooms/0@0", question, "Room 7", "rooms", QUESTION)
    script = [CALL, CUT, NOTE + NOTE + END, "Room 7" + END]

    engine = Talker(script)
    async with rollouter_of(spec, [engine], room=600, max_prompt=512) as rollouter:
        made = await group(rollouter, prompt, size=2, room=600)
    assert len(made.trajectories) == 2
    assert len(engine.asked) == 8

    opening = renderer.opening([user(QUESTION)], [tool.schema for tool in load_tools(TOOLS).values()])
    for trajectory in made.trajectories:
        (sequence,) = trajectory.sequences
        said, heard = sampled_and_not(sequence)
        assert said == script, "odd blanks survive"
        assert len(sequence.logprobs) == sequence.sampled.sum() == sum(len(ids(text)) for text in said)
        assert sequence.token_ids[: sequence.opening_tokens].tolist() == opening
        assert "<tool_response>\nlamp: room 7\n</tool_response>" in heard[1]
        assert heard[2].startswith(END), "the renderer closes a cut reply; that token was not sampled"
        assert "error: the call was not closed" in heard[2]
        assert heard[3].count("<tool_response>") == 2
        assert "1 notes" in heard[3]
        assert "2 notes" in heard[3], "one notebook an episode"
        assert trajectory.text == "Room 7"

        begun = {sequence.token_ids[:start].tobytes() for start, _ in pieces(sequence)}
        assert {request.token_ids.tobytes() for request in engine.asked} == begun
