"""What the last lines of a run say about its model."""

from pathlib import Path

from app.start.output_folder import kept_in
from tests.checkpoint.test_best import save


def test_the_last_lines_name_the_model_the_checkpoints_and_the_commands(tmp_path: Path) -> None:
    run = tmp_path / "a run"
    checkpoints = save(run).folder
    lines, facts = kept_in(run, exported=True, continued=["steps=120"])
    assert lines == {
        "model": str(run / "export"),
        "last": str(checkpoints / "step_50"),
        "best": f"{checkpoints / 'step_20'}  (eval accuracy 80.0%)",
        "evaluate": f"python -m app mode=eval 'resume=\"{run}\"'",
        "continue": f"python -m app 'resume=\"{run}\"' steps=120",
    }
    assert facts == {
        "model": str(run / "export"),
        "checkpoint/last": str(checkpoints / "step_50"),
        "checkpoint/best": str(checkpoints / "step_20"),
        "checkpoint/best_step": 20,
        "checkpoint/best_accuracy": 0.8,
    }


def test_a_run_that_did_not_finish_names_no_model_and_one_that_kept_nothing_says_nothing(tmp_path: Path) -> None:
    save(tmp_path / "run", [(10, None)])
    last = str(tmp_path / "run" / "checkpoints" / "step_10")
    assert kept_in(tmp_path / "run", exported=False) == ({"last": last}, {"checkpoint/last": last})
    assert kept_in(tmp_path / "other", exported=False, continued=["steps=120"]) == ({}, {})


def test_a_damaged_best_does_not_hide_how_the_run_ended(tmp_path: Path) -> None:
    folder = save(tmp_path).folder
    (folder / "step_20" / "state.json").write_text("{")
    assert kept_in(tmp_path, exported=False) == ({}, {})
