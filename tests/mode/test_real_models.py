"""Real pretrained models of other families in conversations: real SGLang, FSDP2 and Ray."""

import json
from pathlib import Path
from typing import Any

import pytest

from app.environment.rendering import renderer_for
from app.environment.rendering.agreement import first_difference
from app.environment.rendering.chat import ChatRenderer
from app.environment.tools import load_tools
from app.model.hf_directory import load_tokenizer
from tests.mode.test_environment_chat_runs import HERE, LIMIT_S, ROOMS, SIZES, Start, finished, roles, samples
from tests.real_models import MAKE_S, real_model
from tests.real_models.tool_tags import with_tags

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


def test_a_qwen25_calls_tools(start: Start, rows: list[str], tmp_path: Path) -> None:
    """An evaluation: a trainer of 0.6B parameters in float32 takes more memory than small machines have."""
    schemas = [tool.schema for tool in load_tools([f"{HERE}.search"]).values()]
    lessons = [lesson(thing, room) for thing, room in ROOMS.items()]
    folder = with_tags(real_model("qwen25"), tmp_path / "qwen25", lessons, schemas)

    tools = ["environment=tools", f"environment.tools=[{HERE}.search]"]
    model = ["model=hf", f"model.path={folder}", *SIZES, "mode=eval", "tracking.samples_per_step=100"]
    run = start(*model, *rows, *tools)
    assert run.wait(LIMIT_S) == 0, run.text
    (evaluation,) = [line for line in run.metrics() if "eval/accuracy" in line]
    assert evaluation["eval/accuracy"] >= 0

    played = [json.loads(line) for line in next((run.folder / "samples").glob("*.jsonl")).read_text().splitlines()]
    assert any(roles(sample)[:4] == ["user", "assistant", "tool", "assistant"] for sample in played)
    found = [turn["text"] for sample in played for turn in sample["turns"] if turn["role"] == "tool"]
    assert any(text.endswith(tuple(f"room {room}" for room in ROOMS.values())) for text in found), found
