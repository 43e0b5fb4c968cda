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
