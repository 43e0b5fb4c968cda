import json
from pathlib import Path
from typing import Any

import pytest

from app.config import RunConfig
from app.errors import EngineError, Interrupted
from app.tracking.recorder import RunFolderRecorder, evaluation_metrics
from tests.folders import json_lines
from tests.tracking.records import group, metrics


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def test_a_run_leaves_metrics_samples_prompts_summary_and_timeline(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with RunFolderRecorder(RunConfig(steps=2), folder) as recorder:
        assert summary(folder)["status"] == "running"
        recorder.log_eval(0, {"eval": {"accuracy": 0.25}})
        for step in (1, 2):
            with recorder.timeline.span("driver", f"step {step}"):
                recorder.log(step, metrics(step))
            recorder.log_samples(step, [group(0, [0.0, 1.0])])
        recorder.log_prompts(1, trained=["a/1@0"], filtered=["a/2@0", "a/3@0"], unplayable=["a/3@0"])
        recorder.note("evaluating", {"evaluated/step": 2})
        recorder.log_eval(2, {"eval": {"accuracy": 0.75}})
    accuracies = [(row["step"], row.get("eval/accuracy")) for row in json_lines(folder / "metrics.jsonl")]
    assert accuracies == [(0, 0.25), (1, None), (2, 0.75)]
    found = {"status": "finished", "steps": 2, "eval/accuracy_last": 0.75, "evaluated/step": 2}
    assert found.items() <= summary(folder).items()
    prompts = {"step": 1, "trained": ["a/1@0"], "filtered": ["a/2@0", "a/3@0"], "unplayable": ["a/3@0"]}
    assert json.loads((folder / "prompts.jsonl").read_text()) == prompts
    assert (folder / "samples/step_2.jsonl").exists()
    names = [event["name"] for event in json.loads((folder / "timeline.json").read_text())["traceEvents"]]
    assert names[-2:] == ["step 1", "step 2"]


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (Interrupted("stopped by SIGTERM"), "interrupted", "stopped by SIGTERM"),
        (KeyboardInterrupt(), "interrupted", "Ctrl-C"),
        (EngineError("engine 0 died"), "failed", "EngineError: engine 0 died"),
    ],
)
def test_the_summary_has_the_reason_of_a_run_that_did_not_finish(
    tmp_path: Path, error: EngineError | Interrupted | KeyboardInterrupt, status: str, message: str
) -> None:
    with pytest.raises(type(error)), RunFolderRecorder(RunConfig(), tmp_path):
        raise error
    assert (summary(tmp_path)["status"], summary(tmp_path)["error"]) == (status, message)


def test_a_warning_is_reported_once_and_again_where_its_step_is_trained_again(tmp_path: Path) -> None:
    with RunFolderRecorder(RunConfig(steps=6), tmp_path) as recorder:
        recorder.warn("before")
        for step in (1, 2, 3):
            recorder.log(step, metrics(step))
        recorder.warn("later")
        recorder.resume(2)
        for text in ("before", "later"):
            recorder.warn(text)
    lines = json_lines(tmp_path / "logs/warnings.jsonl")
    assert [(line["step"], line["text"]) for line in lines] == [(0, "before"), (2, "later")]


def test_a_resumed_run_sets_later_steps_aside_and_its_summary_covers_the_whole_run(tmp_path: Path) -> None:
    with RunFolderRecorder(RunConfig(steps=6), tmp_path) as recorder:
        recorder.log_eval(0, {"eval": {"accuracy": 0.25}})
        for step in (1, 2, 3):
            recorder.log(step, metrics(step))
            recorder.log_samples(step, [group(0, [0.0, 1.0])])
            recorder.log_prompts(step, trained=[f"a/{step}@0"], filtered=[])
        recorder.warn("odd")
    third = (tmp_path / "samples/step_3.jsonl").read_bytes()
    with RunFolderRecorder(RunConfig(steps=6), tmp_path) as recorder:
        recorder.resume(2)
        for step in (3, 4):
            recorder.log(step, metrics(step))
        recorder.log_eval(4, {"eval": {"accuracy": 0.5}})
    assert [row["step"] for row in json_lines(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    assert not (tmp_path / "samples/step_3.jsonl").exists()
    content = summary(tmp_path)
    assert (content["steps"], content["total/completion_tokens"]) == (4, 400)
    assert (content["eval/accuracy_first"], content["eval/accuracy_last"]) == (0.25, 0.5)
    aside = tmp_path / "aside_1"
    assert [row["step"] for row in json_lines(aside / "metrics.jsonl")] == [3]
    assert (aside / "samples/step_3.jsonl").read_bytes() == third
    assert json.loads((aside / "prompts.jsonl").read_text()) == {"step": 3, "trained": ["a/3@0"], "filtered": []}
    assert json.loads((aside / "logs/warnings.jsonl").read_text())["text"] == "odd"
    with RunFolderRecorder(RunConfig(steps=6), tmp_path) as recorder:
        recorder.resume(4)  # nothing is later
        assert recorder.accuracy == 0.5
        recorder.resume(3)
    assert sorted(path.name for path in tmp_path.glob("aside_*")) == ["aside_1", "aside_2"]


def test_several_evaluation_sets_keep_their_names_and_the_accuracy_is_their_mean() -> None:
    assert evaluation_metrics({"eval": {"accuracy": 0.5, "tokens": 3.0}}) == {"eval/accuracy": 0.5, "eval/tokens": 3.0}
    assert evaluation_metrics({"easy": {"accuracy": 1.0}, "hard": {"accuracy": 0.5}}) == {
        "eval/easy/accuracy": 1.0,
        "eval/hard/accuracy": 0.5,
        "eval/accuracy": 0.75,
    }
    sets = {"easy": {"accuracy": 1.0, "accuracy_stderr": 0.3}, "hard": {"accuracy": 0.5, "accuracy_stderr": 0.4}}
    assert evaluation_metrics(sets)["eval/accuracy_stderr"] == pytest.approx(0.25)  # √(0.09 + 0.16) ÷ 2
