"""Unmodified environments of verifiers in interpreters of their own, through a worker; the engine is scripted."""

import asyncio
import importlib.metadata
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.environment import verifiers
from app.environment.pool import EnvironmentSpec
from app.environment.protocol import Task
from app.environment.verifiers.environment_host import own_renderer
from app.environment.wire import Answer, End, Limits, RendererChoice, SampleRequest
from app.utils.user_code import LoadError
from app.worker.wire import Failed
from tests.environment.interpreters import BUILD_S, interpreter
from tests.environment.openenv_server import echo_server
from tests.environment.pools import PATIENCE_S, running_pool
from tests.environment.qwen import decoded, ids, write_model

V1 = ("verifiers[openenv]==0.4.0", "uv")
PACKAGES = Path(__file__).parent / "packages"
NO_TOOLS = {"harness": {"id": "null"}}  # a chat loop; what needs no sandbox runs beside the worker
STOP = "<|im_end|>"


def settings(**changes: Any) -> dict[str, Any]:
    renderer = {"name": "qwen3", "model_path": "/nowhere", "thinking": "template"}
    return {"id": "some_env", "args": {}, "renderer": renderer, "limits": {"max_turns": 4}, **changes}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """Says which version of verifiers is installed here."""

    def install(number: str | None) -> None:
        def version(name: str) -> str:
            if number is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return number

        monkeypatch.setattr(importlib.metadata, "version", version)

    return install


def test_what_cannot_be_used_is_refused(
    installed: Callable[[str | None], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version, problem in (
        (None, "verifiers is not installed"),
        ("0.2.1", "0.2.1 is not"),
        ("0.5.0", "0.5.0 is not"),
    ):
        installed(version)
        with pytest.raises(LoadError, match=rf"{problem}.*; install verifiers 0\.4\.x$"):
            verifiers.make(settings())

    installed("0.4.7")
    for tasks, shown in ((0, "0"), (-1, "-1"), ("3", '"3"'), (True, "true")):
        with pytest.raises(LoadError, match=rf"^environment\.args\.tasks={shown} is not a number of tasks$"):
            verifiers.make(settings(args={"tasks": tasks}))

    folder = write_model(tmp_path / "model", "qwen3")
    source = (folder / "chat_template.jinja").read_text()
    for name, template in (("plain", source), ("chat", source.replace("# Tools", "# My tools"))):
        choice = {"name": name, "model_path": str(folder), "thinking": "template", "template": template}
        with pytest.raises(LoadError, match="the chat templates of qwen3 and"):
            verifiers.make(settings(renderer=choice))

    monkeypatch.setattr(verifiers, "Host", lambda *_: SimpleNamespace(rows=list))
    monkeypatch.setattr(verifiers, "own_renderer", lambda choice: None)
    with pytest.raises(LoadError, match=r"^some_env has no tasks$"):
        verifiers.make(settings())


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


@pytest.mark.slow
@pytest.mark.timeout(BUILD_S)
@pytest.mark.parametrize(
    ("trained", "sentence"),
    [
        (False, "its agent judge is not trained, but would be played by the policy: give it a model by"),
        (True, "it trains the agents judge, solver, but an episode has one reward"),
    ],
)
def test_what_several_agents_say_is_trained_on_only_with_one_reward(
    runner: Runner, trained: bool, sentence: str
) -> None:
    args = {"solver": NO_TOOLS, "judge": NO_TOOLS, "trained": trained}
    (played,) = runner(interpreter(*V1), "vf-judged", args, (1, ["2" + STOP, "2" + STOP]))
    assert isinstance(played.end, Failed)
    assert sentence in played.end.text
    assert len(played.engine.said) == (2 if trained else 1)


@pytest.mark.slow
@pytest.mark.timeout(BUILD_S)
def test_the_openenv_taskset_that_verifiers_0_4_ships_extends_one_sequence(runner: Runner, tmp_path: Path) -> None:
    with echo_server(tmp_path / "server", sessions=4) as server:
        args = {"taskset": {"base_url": server.url.replace("ws", "http", 1)}, "player": NO_TOOLS}
        said = [json.dumps({"message": text}) + STOP for text in ("hi", "hello", "again")]
        (played,) = runner(interpreter(*V1), "openenv", args, (0, said), max_turns=3)

    assert scores(played)["reward"] == pytest.approx(1.2), "0.1 a character"
    assert played.engine.said == said
    assert len(played.engine.sequences) == 1
    text = played.engine.text(0)
    places = [text.index(each) for each in ("Echo environment ready!", *said)]
    assert places == sorted(places)
