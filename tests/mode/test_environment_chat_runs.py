"""Whole runs with environments in a chat format: all parts are real, and a small Qwen3 was taught to talk."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.environment.rendering import Renderer
from app.environment.tools import load_tools
from tests.environment.qwen_policy import Lesson, conversation, write_policy
from tests.mode.chat_environments import ROOMS
from tests.runs import Run

HERE = "tests.mode.chat_environments"
TOOLS = [f"{HERE}.search", f"{HERE}.Notebook"]
ADDS = '<tool_call>\n{"name": "add", "arguments": {"a": %d, "b": %d}}\n</tool_call>'
ADD = {
    "properties": {"a": {"title": "A", "type": "integer"}, "b": {"title": "B", "type": "integer"}},
    "required": ["a", "b"],
    "title": "add_args",
    "type": "object",
    "additionalProperties": False,
}
ROLES = ["user", "assistant", "tool", "assistant"]
PLACEMENTS = {
    "colocate": ["placement=colocate"],
    "fully_async": ["placement=fully_async", "placement.max_staleness=0", "placement.in_flight=drain"],
}
LIMIT_S = 1500.0  # of a run on a busy machine
SIZES = [
    "device.dtype=float32",
    "steps=2",
    "algorithm.prompts_per_step=2",
    "algorithm.group_size=4",
    "rollout.max_prompt_tokens=512",
    "rollout.max_completion_tokens=256",
    "environment.max_turn_tokens=48",
    "environment.timeout_s=120",
    "trainer.tokens_per_microbatch=2048",
    "trainer.lr=1e-4",
    "trainer.activation_checkpointing=none",
    "eval.before_train=false",
]


def lessons(renderer: Renderer) -> list[Lesson]:
    """Where things are: asked with tools, without them, and by an agent that asks again; sums."""
    schemas = [tool.schema for tool in load_tools(TOOLS).values()]
    taught = []
    for name, room in ROOMS.items():
        question, said, again = user(f"Where is the {name}?"), assistant(f"Room {room}"), user("Are you sure?")
        call = assistant(f'<tool_call>\n{{"name": "search", "arguments": {{"query": "{name}"}}}}\n</tool_call>')
        result = {"role": "tool", "name": "search", "content": f"{name}: room {room}"}
        taught.append(conversation(renderer, [question, call, result, said], schemas))
        taught.append(conversation(renderer, [question, said, again, said]))
    for n in range(3):
        question, call = user(f"What is {n}+{n}?"), assistant(ADDS % (n, n))
        result = {"role": "tool", "name": "add", "content": str(2 * n)}
        taught.append(conversation(renderer, [question, assistant(str(2 * n))]))
        adding = [question, call, result, assistant(str(2 * n))]
        schema = tool("add", "Add two numbers.", ADD)
        schema["function"]["strict"] = True
        taught.append(conversation(renderer, adding, [schema]))
    return taught


def tool(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy") / "talker", lessons)


@pytest.fixture
def rooms(tmp_path: Path) -> list[str]:
    path = tmp_path / "rooms.jsonl"
    rows = [{"question": f"Where is the {name}?", "answer": f"Room {room}"} for name, room in ROOMS.items()] * 2
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = ["data=arithmetic", "data.name=rooms", f"data.path={path}", "data.template=chat"]
    return [*own, "reward=exact"]


Start = Callable[..., Run]


def finished(run: Run, *, most_staleness: int = 0) -> list[dict[str, Any]]:
    """The metrics of the steps of a run that ended well, was exact in every token, and left no process."""
    assert run.wait(LIMIT_S) == 0, run.text
    assert run.gone_within(30), run.processes()
    steps = [line for line in run.metrics() if "time/step" in line]
    for line in steps:
        assert line["staleness/max"] <= most_staleness
        assert line["mismatch/abs_difference"] < 1e-4 or line["staleness/max"] > 0
        assert line["environment/failed_episodes"] == 0
    return steps


def samples(run: Run, step: int) -> list[dict[str, Any]]:
    lines = (run.folder / "samples" / f"step_{step}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def roles(sample: dict[str, Any]) -> list[str]:
    return [turn["role"] for turn in sample["turns"]]


def talker(policy: Path) -> list[str]:
    return ["model=hf", f"model.path={policy}", *SIZES]


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_run_with_tools_is_exact_in_every_turn(placement: str, start: Start, policy: Path, rooms: list[str]) -> None:
    tools = ["environment=tools", f"environment.tools=[{','.join(TOOLS)}]"]
    run = start(*talker(policy), *rooms, *tools, *PLACEMENTS[placement])
    steps = finished(run)
    assert [line["step"] for line in steps] == [1, 2]
    assert all(line["environment/sequences_mean"] == 1.0 for line in steps)
    assert max(line["environment/tool_calls"] for line in steps) > 0
    played = [sample for step in (1, 2) for sample in samples(run, step)]
    called = [sample for sample in played if roles(sample)[:4] == ROLES]
    assert called, "the policy calls tools"
    found = [turn["text"] for sample in called for turn in sample["turns"] if turn["role"] == "tool"]
    assert any(re.fullmatch(r"(lamp|door|wall|tree): room \d", text) for text in found), found
    assert run.summary()["status"] == "finished"
