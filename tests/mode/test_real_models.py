"""Real pretrained models of other families in conversations: real SGLang, FSDP2 and Ray."""

import json
from pathlib import Path
from typing import Any

import pytest

from app.environment.rendering import renderer_for
from app.environment.rendering.agreement import first_difference
from app.environment.rendering.chat import ChatRenderer
from app.model.hf_directory import load_tokenizer
from tests.mode.test_environment_chat_runs import HERE, LIMIT_S, ROOMS, SIZES, Start, finished, roles, samples
from tests.real_models import MAKE_S, real_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(MAKE_S + LIMIT_S)]
QUESTION = "Where is the {}? Search for it with the tool, then answer."
FEW = ["steps=1", "trainer.lr=1e-6", "checkpoint.export=false"]


@pytest.mark.parametrize(("name", "syntax"), [("smollm2", None), ("qwen25", "qwen3")])
def test_a_real_tokenizer_and_template_are_rendered_as_transformers_renders_them(name: str, syntax: str | None) -> None:
    folder = real_model(name)
    renderer = renderer_for("chat", str(folder))
    assert isinstance(renderer, ChatRenderer)
    assert renderer.tool_syntax == syntax
    assert first_difference(renderer, load_tokenizer(folder), {"enable_thinking": False}) is None


@pytest.fixture
def rows(tmp_path: Path) -> list[str]:
    path = tmp_path / "rooms.jsonl"
    lines = [{"question": QUESTION.format(name), "answer": f"Room {room}"} for name, room in ROOMS.items()] * 2
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    own = ["data=arithmetic", "data.name=rooms", f"data.path={path}", "data.template=chat"]
    return [*own, "reward=exact"]


def test_a_llama_with_a_chatml_template_trains_in_two_turns(start: Start, rows: list[str]) -> None:
    agent = [f"environment._target_={HERE}.Agent", "reward=environment"]
    run = start("model=hf", f"model.path={real_model('smollm2')}", *SIZES, *FEW, *rows, *agent)
    (step,) = finished(run)
    assert (step["environment/turns_mean"], step["environment/sequences_mean"]) == (2.0, 1.0)
    assert all(roles(sample) == ["user", "assistant"] * 2 for sample in samples(run, 1))


def lesson(thing: str, room: int) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "search", "arguments": {"query": thing}}}
    return [
        {"role": "user", "content": QUESTION.format(thing)},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": f"{thing}: room {room}"},
        {"role": "assistant", "content": f"Room {room}"},
    ]
