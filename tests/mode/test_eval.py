"""`mode=eval` of a checkpoint: with an environment, and interrupted. A plain one is in `test_train.py`."""

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

import app.mode.eval
from app.config import Mode, RunConfig
from app.mode.eval import subject_of
from tests.folders import a_run, content, json_lines, run_new_app
from tests.runs import Run


def test_an_evaluation_that_is_interrupted_during_its_export_leaves_no_model_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go = threading.Event(), threading.Event()

    def slow_export(checkpoint: Path, source: Path, out: Path) -> None:
        began.set()
        assert go.wait(60)
        out.mkdir()

    async def interrupted(settings: RunConfig) -> None:
        async def evaluate() -> None:
            async with subject_of(settings, tmp_path, run / "checkpoints" / "step_4", Mock()):
                pass

        task = asyncio.create_task(evaluate())
        assert await asyncio.to_thread(began.wait, 60)
        task.cancel()
        await asyncio.wait({task}, timeout=0.1)
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    run = a_run(tmp_path / "run", step=4)
    monkeypatch.setattr(app.mode.eval, "export_checkpoint", slow_export)
    monkeypatch.setattr(app.mode.eval, "source_of", lambda config, state: tmp_path)
    asyncio.run(interrupted(RunConfig(mode=Mode.eval, resume=str(run))))
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


CALCULATOR = ["model=tiny_tools", "data=products", "environment=calculator", "data.products.eval_problems=20"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_checkpoint_and_a_model_are_evaluated_with_an_environment(start: Callable[..., Run], tmp_path: Path) -> None:
    run = start(*CALCULATOR, "steps=2", "checkpoint.keep=1", "checkpoint.export=false", "tracking.samples_per_step=100")
    assert run.wait() == 0, run.text
    before = content(run.folder)
    initial, trained = (turns(run.folder / "samples" / f"eval_{step}.jsonl") for step in (0, 2))

    code, text = run_new_app("mode=eval", f"resume={run.folder}", cwd=tmp_path)
    assert code == 0, text
    assert content(run.folder) == before
    (folder,) = (tmp_path / "outputs" / "tiny_tools-eval").iterdir()
    assert turns(folder / "samples" / "eval_2.jsonl") == trained
    (row,) = json_lines(folder / "metrics.jsonl")
    last = run.metrics()[-1]
    assert row == {name: last[name] for name in ("step", *(name for name in last if name.startswith("eval/")))}
    assert (folder / "logs" / "environment.log").exists()

    code, text = run_new_app(
        "mode=eval", *CALCULATOR, "hydra.run.dir=model", "tracking.samples_per_step=100", cwd=tmp_path
    )
    assert code == 0, text
    assert turns(tmp_path / "model" / "samples" / "eval_0.jsonl") == initial
    assert len(initial) == 20
    assert json.loads((tmp_path / "model" / "summary.json").read_text())["status"] == "finished"
    report = (tmp_path / "model" / "report.html").read_text()
    assert "assistant" in report


def turns(file: Path) -> dict[str, list[tuple[str, str]]]:
    """Prompt id → role and text of each turn."""
    return {row["prompt"]: [(turn["role"], turn["text"]) for turn in row["turns"]] for row in json_lines(file)}
