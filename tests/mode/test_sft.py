"""Supervised runs, and demonstrations beside rewards, as a user starts them."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from app.checkpoint.run_state import RunState, write_state
from app.config.model import LoraConfig
from app.model.hf_directory import identity
from app.placement.controller import CURSOR, DEMONSTRATIONS
from app.start.input_checks import same_run
from app.start.inputs import CheckStage, RunInputs
from tests.compose import composed
from tests.folders import json_lines
from tests.refusals import refused
from tests.runs import Run
from tests.tiny_models.make import Recipe

ROWS = [("12+34=", "46"), ("10+11=", "21"), ("50+34=", "84"), ("15+64=", "79"), ("23+23=", "46"), ("71+18=", "89")]
CHAT = ["data.question=messages", "data.template=chat"]
STEP = ["algorithm.prompts_per_step=4", "trainer.lr=1e-3", "trainer.schedule=linear"]


def steps_of(run: Run) -> list[dict[str, Any]]:
    """Return the lines of the steps, without what depends on the machine."""
    machine = ("time/", "memory/", "checkpoint/", "trainer/tokens_per_second")
    lines = [line for line in run.metrics() if "time/step" in line]
    return [{name: value for name, value in line.items() if not name.startswith(machine)} for line in lines]


def test_a_supervised_run_starts_no_engine_and_a_resumed_one_is_the_same(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    with rows.open("w") as lines:
        for question, answer in ROWS:
            asked, reply = {"role": "user", "content": question}, {"role": "assistant", "content": answer}
            lines.write(json.dumps({"messages": [asked, reply]}) + "\n")
    line = ["mode=sft", f"data.path={rows}", f"data.eval_path={rows}", *CHAT, *STEP, "eval.every=0", "seed=3"]
    (tmp_path / "whole").mkdir()
    whole = Run(tmp_path / "whole", *line, "steps=8", "checkpoint.keep=1")
    assert whole.wait() == 0, whole.text
    assert not list((whole.folder / "logs").glob("engine*"))
    assert whole.summary()["status"] == "finished"

    run = start(*line, "steps=8", "checkpoint.every=3", "checkpoint.keep=3")
    assert run.wait() == 0, run.text
    expected = steps_of(whole)
    assert steps_of(run) == expected
    assert expected[0]["loss/ce"] == expected[0]["loss/total"] > 1.3 * expected[-1]["loss/ce"]

    again = start(f"resume={run.folder}/checkpoints/step_3")  # of itself a supervised run
    assert again.wait() == 0, again.text
    assert steps_of(again) == expected
    exported = [(each.folder / "export" / "model.safetensors").read_bytes() for each in (whole, again)]
    assert exported[0] == exported[1]
    prompts = [line["trained"] for line in json_lines(run.folder / "prompts.jsonl")]
    assert len(prompts) == 8
    assert len({prompt for step in prompts for prompt in step}) == 32  # ids have the epoch


@pytest.mark.parametrize("mode", ["sft", "train"])
@pytest.mark.parametrize("changed", [False, True])
def test_a_resume_refuses_replies_that_changed(mode: str, changed: bool, tiny_model: Path, tmp_path: Path) -> None:
    file, checkpoint = tmp_path / "replies.jsonl", tmp_path / "step_4"
    checkpoint.mkdir()

    def inputs(work: str) -> RunInputs:
        """Only what the reply says before the answer differs."""
        file.write_text("".join(json.dumps({"question": q, "answer": f"{work} #### {a}"}) + "\n" for q, a in ROWS))
        asked = tmp_path / "asked.jsonl"
        asked.write_text(json.dumps({"question": "13+13=", "answer": "#### 26"}) + "\n")
        imitated = [f"data.demonstrations={file}"] if mode == "train" else []
        line = [f"mode={mode}", f"data.path={file}", f"data.eval_path={asked}", "data.answer_after='####'", *imitated]
        return RunInputs(composed(*line), CheckStage.start, checkpoint=checkpoint)

    before = inputs("add")
    saved: dict[str, Any] = {CURSOR: before.prompts.train.state()}
    if mode == "train":
        saved[DEMONSTRATIONS] = before.demonstrations.fingerprint
    write_state(checkpoint, RunState(4, 4, saved, identity(tiny_model, LoraConfig())), {})

    now = inputs("sum" if changed else "add")
    with refused("data" if mode == "sft" else "data.demonstrations") if changed else nullcontext():
        same_run(now)


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["colocate", "fully_async"])
def test_demonstrations_are_imitated_beside_rewards(placement: str, start: Callable[..., Run], tmp_path: Path) -> None:
    demonstrations = tmp_path / "demonstrations.jsonl"
    demonstrations.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in ROWS))
    line = [f"placement={placement}", f"data.demonstrations={demonstrations}", "algorithm.demonstrations_per_step=6"]
    run = start(*line, "algorithm.ce_coefficient=0.5", "steps=6", "eval.before_train=false", "trainer.lr=1e-3")
    assert run.wait() == 0, run.text
    steps = steps_of(run)
    assert steps[-1]["loss/ce"] < steps[0]["loss/ce"]
    for step in steps:
        assert step["loss/total"] == pytest.approx(step["loss/policy"] + 0.5 * step["loss/ce"], abs=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_random_model_learns_sums_from_replies_and_then_from_rewards(
    made_model: Callable[..., Path], start: Callable[..., Run], tmp_path: Path, record_property: Callable[..., None]
) -> None:
    """What a warm-up is for: at first no answer is right, so that rewards alone teach nothing."""
    random = made_model(Recipe(), warmed_up=False)
    rates = ["steps=300", "algorithm.prompts_per_step=64", "trainer.lr=5e-3", "eval.every=300"]
    (tmp_path / "supervised").mkdir()
    first = Run(tmp_path / "supervised", "mode=sft", f"model.path={random}", *rates, "checkpoint.keep=1")
    assert first.wait() == 0, first.text
    second = start(f"model.path={first.folder / 'export'}", "eval.every=60")
    assert second.wait() == 0, second.text

    found = [run.summary()[f"eval/accuracy_{name}"] for run in (first, second) for name in ("first", "last")]
    record_property("accuracies", found)
    assert found[0] == 0
    assert 0.1 < found[1] == found[2]  # the export is what was evaluated
    assert found[3] > found[2] + 0.05
