import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from app.config import RunConfig
from app.tracking.recorder import RunFolderRecorder
from app.tracking.run_folder import samples
from tests.folders import json_lines, warnings
from tests.tracking.records import episode_group, group, metrics


def test_samples_are_spread_evenly_over_prompts_before_any_gives_a_second() -> None:
    groups = [group(row, [0.0, 1.0]) for row in range(8)]
    chosen = samples.choose(groups, 4)
    assert [(one.prompt.answer, one.text) for one in chosen] == [(str(row), "text 0") for row in (0, 2, 4, 6)]
    assert [one.text for one in samples.choose(groups[:2], 3)] == ["text 0", "text 0", "text 1"]
    assert len(samples.choose(groups, 100)) == 16
    assert samples.choose(groups, 0) == []


def test_a_line_has_tokens_and_rewards_and_of_an_episode_every_turn_and_sequence(tmp_path: Path) -> None:
    groups = [group(7, [0.5, float("nan")], version=2), episode_group()]
    path = samples.write_samples(tmp_path, 3, groups, 4, lambda ids: f"q{ids}")
    assert path == tmp_path / "samples/step_3.jsonl"
    assert path is not None
    first, episode, failed, _ = json_lines(path)
    assert (first["prompt"], first["prompt_text"], first["answer"]) == ("arithmetic/7@0", "q[7, 1, 2]", "7")
    assert (first["completion"], first["reward"], first["reward_components"]) == ("text 0", 0.5, {"exact": 0.5})
    assert (first["tokens"], first["logprobs"], first["versions"]) == ([0], [-0.25], [[2, 0, 1]])
    assert (failed["reward"], failed["logprobs"]) == (None, [-0.25, -0.25])

    assert (episode["completion"], episode["ending"], episode["scores"]) == (
        "42",
        "stop",
        {"found": 1.0, "polite": None},
    )
    assert episode["turns"][1] == {"role": "assistant", "text": "<b>41</b>", "tokens": 2, "seconds": 1.25}
    (sequence,) = episode["sequences"]
    assert json.loads(samples.line({"gaps": np.arange(5, dtype=np.int32)[::2]})) == {"gaps": [0, 2, 4]}
    assert (sequence["tokens"], sequence["sampled"]) == ([0, 1, 2, 3, 4, 5], [0, 0, 1, 1, 0, 1])
    assert (sequence["logprobs"], sequence["versions"]) == ([-0.5, -0.25, -0.75], [[3, 0, 3]])


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
    rows = json_lines(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[1]["eval/accuracy"] == 0.75
    assert [text.split()[0] for text in warnings(tmp_path)] == ["samples", "timeline.json"]
