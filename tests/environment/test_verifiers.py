"""Unmodified environments of verifiers in interpreters of their own, through a worker; the engine is scripted."""

import asyncio
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from app.environment.pool import EnvironmentPool, EnvironmentSpec
from app.environment.protocol import Task
from app.environment.verifiers.environment_host import own_renderer
from app.environment.wire import Answer, End, Limits, RendererChoice, SampleRequest
from tests.environment.pools import PATIENCE_S, running_pool
from tests.environment.qwen import decoded, ids, write_model

V1 = ("verifiers[openenv]==0.4.0", "uv")
PACKAGE = Path(__file__).parent / "packages" / "vf_sums.py"
NO_TOOLS = {"harness": {"id": "null"}}  # a chat loop; what needs no sandbox runs beside the worker
STOP = "<|im_end|>"
CACHE = "POSTTRAIN_TEST_INTERPRETERS"  # an environment variable: where they are kept
BUILD_S = 2400  # limit of a test that builds its interpreters first


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "qwen3.5"])
def test_verifiers_renders_as_the_model_does(tmp_path: Path, family: str, enabled: bool) -> None:
    folder = write_model(tmp_path / "model", family)
    choice = {"name": "chat", "model_path": str(folder), "thinking": "keep", "enable_thinking": enabled}
    config = own_renderer(choice)
    assert (config.name, config.enable_thinking, config.thinking_retention) == (family, enabled, "all")


def interpreter(*requirements: str) -> Path:
    """Return a Python of this version in which the requirements are installed, and nothing of ours."""
    root = Path(os.environ.get(CACHE) or Path(tempfile.gettempdir()) / "posttrain-interpreters")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = root / hashlib.sha256("\n".join([version, *requirements]).encode()).hexdigest()[:12]
    python, finished = folder / "bin" / "python", folder / "finished"

    root.mkdir(parents=True, exist_ok=True)
    with (root / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not finished.exists():
            make = [sys.executable, "-m", "venv", "--clear", str(folder)]
            for command in (make, [str(python), "-m", "pip", "install", "--quiet", *requirements]):
                done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
                assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
            finished.touch()
    return python


async def play(pool: EnvironmentPool, index: int, *script: str) -> tuple[str, End]:
    """The text of an episode's first sequence, and how it ended. Sequences only grow."""
    session = await pool.begin(Task(f"set/{index}@0", "", "", "set", {"index": index}), [])
    left, sequences = [*script], list[list[int]]()
    while isinstance(event := await asyncio.wait_for(session.next(), 4 * PATIENCE_S), SampleRequest):
        assert event.sequence <= len(sequences)
        if event.sequence == len(sequences):
            sequences.append([])
        said = ids(left.pop(0)) if left else []
        if said:
            before = sequences[event.sequence]
            assert list(event.context[: len(before)]) == before
            sequences[event.sequence] = [*event.context, *said]
        session.reply(event, Answer(event.number, said, "stop" if said else "full", [-0.5] * len(said)))
    assert isinstance(event, End), event
    return decoded(sequences[0]), event


@pytest.mark.slow
@pytest.mark.timeout(BUILD_S)
async def test_a_taskset_of_verifiers_0_4_is_played_and_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = interpreter(*V1)
    shutil.copy(PACKAGE, tmp_path)
    monkeypatch.chdir(tmp_path)
    model = write_model(tmp_path / "model", "qwen3")
    # a real checkpoint names its class, by which transformers finds the tokenizer's file
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": STOP}
    (model / "tokenizer_config.json").write_text(json.dumps(named))
    environment = {"kind": "verifiers", "id": "vf-sums", "args": {"agent": NO_TOOLS}, "list_tasks": True}
    limits = Limits(5, None, 1000, timeout_s=200.0, episode_s=400.0)
    spec = EnvironmentSpec(environment, RendererChoice("chat", str(model), "template"), limits, 8.0, str(python))

    async with asyncio.timeout(280), running_pool(spec, episodes=3) as pool:
        episodes = play(pool, 1, f"2{STOP}"), play(pool, 2, f"five{STOP}"), play(pool, 2)
        (text, right), (_, wrong), (_, full) = await asyncio.gather(*episodes)
        info: dict[str, Any] = dict(pool.info)
    assert info["tasks"] == 3
    assert info["rows"][1] == {"index": 1, "id": "sum-1", "question": "What is 1+1?", "answer": "2"}
    assert right.scores == {"reward": 1.0, "correct": 1.0, "characters": 1.0}
    assert wrong.scores == {"reward": 0.0, "correct": 0.0, "characters": 4.0}
    assert text.startswith("<|im_start|>user\nWhat is 1+1?<|im_end|>\n<|im_start|>assistant\n")
    assert text.endswith("2<|im_end|>")
    assert (full.ending, full.scores["reward"]) == ("length", 0.0)
