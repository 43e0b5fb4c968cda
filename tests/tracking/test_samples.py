import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from app.config import RunConfig
from app.tracking.recorder import RunFolderRecorder
from app.tracking.run_folder import samples
from tests.tracking.records import episode_group, group, metrics


def test_samples_are_spread_evenly_over_prompts_before_any_gives_a_second() -> None:
    groups = [group(row, [0.0, 1.0]) for row in range(8)]
    chosen = samples.choose(groups, 4)
    assert [(one.prompt.answer, one.text) for one in chosen] == [(str(row), "text 0") for row in (0, 2, 4, 6)]
    assert [one.text for one in samples.choose(groups[:2], 3)] == ["text 0", "text 0", "text 1"]
    assert len(samples.choose(groups, 100)) == 16
    assert samples.choose(groups, 0) == []


def test_a_line_has_question_answer_completion_and_reward(tmp_path: Path) -> None:
    path = samples.write_samples(tmp_path, 3, [group(7, [0.5, float("nan")], version=2)], 2, lambda ids: f"q{ids}")
    assert path == tmp_path / "samples/step_3.jsonl"
    assert path is not None
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first == {
        "prompt": "arithmetic/7@0",
        "source": "arithmetic",
        "question": "",
        "prompt_text": "q[7, 1, 2]",
        "answer": "7",
        "completion": "text 0",
        "finish_reason": "stop",
        "reward": 0.5,
        "reward_components": {"exact": 0.5},
        "versions": [[2, 0, 1]],
        "prompt_tokens": [7, 1, 2],
        "tokens": [0],
        "logprobs": [-0.25],
    }
    assert second["reward"] is None
    assert second["logprobs"] == [-0.25, -0.25]


def test_a_line_of_an_episode_has_its_turns_its_ending_its_scores_and_the_tokens_of_every_sequence(
    tmp_path: Path,
) -> None:
    path = samples.write_samples(tmp_path, 3, [episode_group()], 2, lambda ids: "6*7=")
    assert path is not None
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert (first["completion"], first["tokens"], first["reward"]) == ("42", [5], 1.0)
    assert first["turns"][1] == {"role": "assistant", "text": "<b>41</b>", "tokens": 2, "seconds": 1.25}
    assert [turn["role"] for turn in first["turns"]] == ["user", "assistant", "tool", "assistant"]
    assert (first["ending"], second["ending"]) == ("stop", "turns")
    assert first["scores"] == {"found": 1.0, "polite": None}
    assert first["sequences"] == [
        {
            "tokens": [0, 1, 2, 3, 4, 5],
            "sampled": [0, 0, 1, 1, 0, 1],
            "logprobs": [-0.5, -0.25, -0.75],
            "versions": [[3, 0, 3]],
        }
    ]
    assert len(second["sequences"]) == 2


def test_the_samples_after_a_step_are_moved_to_another_folder(tmp_path: Path) -> None:
    for step in (1, 2, 10):
        for kind in ("step", "eval"):
            samples.write_samples(tmp_path, step, [group(0, [1.0, 0.0])], 1, kind=kind)
    samples.move_after(tmp_path, 2, tmp_path / "aside_1")
    assert [step for step, _ in samples.sample_files(tmp_path)] == [1, 2]
    moved = {path.name for path in (tmp_path / "aside_1" / "samples").iterdir()}
    assert moved == {"step_10.jsonl", "eval_10.jsonl"}


def test_a_sample_or_a_timeline_that_cannot_be_written_costs_a_warning_and_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(tokens: Sequence[int]) -> str:
        raise KeyError("a token that nobody knows")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with RunFolderRecorder(RunConfig(steps=2), tmp_path) as recorder:
        monkeypatch.setattr(recorder.timeline, "write_if_due", full)
        for step in (1, 2):
            recorder.log_samples(step, [group(0, [0.0, 1.0])], broken)
            recorder.log(step, metrics(step))
        recorder.log_eval(2, {"eval": {"accuracy": 0.75}}, [group(0, [0.0, 1.0])], broken)
        monkeypatch.undo()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[1]["eval/accuracy"] == 0.75
    warnings = [json.loads(line)["text"] for line in (tmp_path / "logs" / "warnings.jsonl").read_text().splitlines()]
    samples, timeline = warnings
    assert re.match(r"samples .*\(KeyError\).*logs/driver.log", samples)
    assert re.match("timeline.json .*No space left on device", timeline)


def test_a_warning_that_cannot_be_written_does_not_end_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = RunFolderRecorder(RunConfig(), tmp_path)
    (tmp_path / "logs").write_text("a file in the place of the folder")
    recorder.warn("engine 0 was restarted")
    assert "engine 0 was restarted" in caplog.text


def test_numbers_of_a_line_are_those_of_a_plain_loop_also_in_arrays_with_gaps() -> None:
    logprobs = -np.random.default_rng(0).exponential(3, 400).astype(np.float32)
    tokens = np.arange(800, dtype=np.int32)[::2]
    values = {"tokens": tokens, "logprobs": samples._rounded(logprobs), "text": 'é "quoted"\n', "empty": tokens[:0]}
    read = json.loads(samples.line(values))
    assert read == {
        "tokens": [2 * index for index in range(400)],
        "logprobs": [round(float(value), 6) for value in logprobs],
        "text": 'é "quoted"\n',
        "empty": [],
    }
