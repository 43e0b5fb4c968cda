"""Unmodified environments of verifiers in interpreters of their own, through a worker; the engine is scripted."""

import asyncio
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from app.environment.pool import EnvironmentSpec
from app.environment.protocol import Task
from app.environment.verifiers.environment_host import own_renderer
from app.environment.wire import Answer, End, Limits, RendererChoice, SampleRequest
from app.worker.wire import Failed
from tests.environment.interpreters import BUILD_S, interpreter
from tests.environment.pools import PATIENCE_S, running_pool
from tests.environment.qwen import decoded, ids, write_model

V1 = ("verifiers[openenv]==0.4.0", "uv")
PACKAGES = Path(__file__).parent / "packages"
NO_TOOLS = {"harness": {"id": "null"}}  # a chat loop; what needs no sandbox runs beside the worker
STOP = "<|im_end|>"


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "qwen3.5"])
def test_verifiers_renders_as_the_model_does(tmp_path: Path, family: str, enabled: bool) -> None:
    folder = write_model(tmp_path / "model", family)
    choice = {"name": "chat", "model_path": str(folder), "thinking": "keep", "enable_thinking": enabled}
    config = own_renderer(choice)
    assert (config.name, config.enable_thinking, config.thinking_retention) == (family, enabled, "all")


@dataclass
class Engine:
    """Answers requests from a script, and checks that sequences only grow."""

    script: Sequence[str]
    sequences: list[list[int]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def answer(self, ask: SampleRequest) -> tuple[list[int], str]:
        assert ask.sequence <= len(self.sequences)
        if ask.sequence == len(self.sequences):
            self.sequences.append([])
        if len(self.said) == len(self.script):
            return [], "full"
        token_ids = ids(self.script[len(self.said)])
        before = self.sequences[ask.sequence]
        assert list(ask.context[: len(before)]) == before
        self.sequences[ask.sequence] = [*ask.context, *token_ids]
        self.said.append(self.script[len(self.said)])
        return token_ids, "stop"

    def text(self, sequence: int) -> str:
        return decoded(self.sequences[sequence])


@dataclass
class Played:
    engine: Engine
    end: End | Failed


class Runner:
    """Plays episodes of one environment in a worker of its interpreter."""

    def __init__(self, folder: Path) -> None:
        self.model = write_model(folder / "model", "qwen3")
        # a real checkpoint names its class, by which transformers finds the tokenizer's file
        named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
        (self.model / "tokenizer_config.json").write_text(json.dumps(named))
        self.info: dict[str, Any] = {}

    def __call__(
        self, python: Path, package: str, args: dict[str, Any], *episodes: tuple[int, Sequence[str]], max_turns: int = 5
    ) -> list[Played]:
        environment = {"kind": "verifiers", "id": package, "args": args, "list_tasks": True}
        limits = Limits(max_turns, None, 1000, timeout_s=200.0, episode_s=400.0)
        renderer = RendererChoice("chat", str(self.model), "template")
        spec = EnvironmentSpec(environment, renderer, limits, 8.0, str(python))
        return asyncio.run(asyncio.wait_for(self._run(spec, episodes), 280))

    async def _run(self, spec: EnvironmentSpec, episodes: Sequence[tuple[int, Sequence[str]]]) -> list[Played]:
        async with running_pool(spec, episodes=max(1, len(episodes))) as pool:
            self.info = dict(pool.info)

            async def play(index: int, script: Sequence[str]) -> Played:
                task = Task(f"set/{index}@0", "", "", "set", {"index": index})
                session = await pool.begin(task, [])
                engine = Engine(script)
                while isinstance(event := await asyncio.wait_for(session.next(), 4 * PATIENCE_S), SampleRequest):
                    token_ids, finish = engine.answer(event)
                    session.reply(event, Answer(event.number, token_ids, finish, [-0.5] * len(token_ids)))
                return Played(engine, event)

            return list(await asyncio.gather(*(play(*episode) for episode in episodes)))


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    for path in PACKAGES.glob("*.py"):
        shutil.copy(path, tmp_path)
    monkeypatch.chdir(tmp_path)
    return Runner(tmp_path)


def scores(played: Played) -> dict[str, float]:
    assert isinstance(played.end, End), played.end
    return dict(played.end.scores)


@pytest.mark.slow
@pytest.mark.timeout(BUILD_S)
def test_a_taskset_of_verifiers_0_4_is_played_and_listed(runner: Runner) -> None:
    right, wrong, full = runner(
        interpreter(*V1), "vf-sums", {"agent": NO_TOOLS}, (1, ["2" + STOP]), (2, ["five" + STOP]), (2, [])
    )

    assert runner.info["tasks"] == 3
    assert runner.info["rows"][1] == {"index": 1, "id": "sum-1", "question": "What is 1+1?", "answer": "2"}
    assert scores(right) == {"reward": 1.0, "correct": 1.0, "characters": 1.0}
    assert scores(wrong) == {"reward": 0.0, "correct": 0.0, "characters": 4.0}
    assert right.engine.text(0).startswith("<|im_start|>user\nWhat is 1+1?<|im_end|>\n<|im_start|>assistant\n")
    assert right.engine.text(0).endswith("2<|im_end|>")
    assert isinstance(full.end, End)
    assert (full.end.ending, dict(full.end.scores)["reward"]) == ("length", 0.0)
