"""What is checked before a run's folder exists, and that it is loaded once."""

import json
import shutil
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from app.errors import ConfigError
from app.model.architecture import architecture_of
from app.model.lora.base_weights import SINGLE
from app.start.input_checks import disk, free_bytes, model_files, plan_disk
from app.start.inputs import CheckStage, CheckStatus, RunInputs
from app.start.preflight import CHECKS, findings, preflight
from tests.compose import composed, problems_of
from tests.folders import python
from tests.model.support import save_qwen3, save_qwen35
from tests.refusals import refused

OWN_MODEL = ("model=hf", "data=arithmetic", "rollout.max_prompt_tokens=64", "rollout.max_completion_tokens=64")


REFUSED = [  # name of a check, what it refuses, and the setting that is named
    ("sizes", ["model=tiny_lora", "model.lora.targets=[qproj]"], "model.lora.targets"),
    ("model", ["model=hf", "model.path={folder}", "data=arithmetic"], "model.path"),
    ("disk", [], "hydra.run.dir"),
    ("data", ["data.path=/no/such.jsonl"], "data.path"),
    ("own code", ["algorithm.advantage=no_such.advantage"], "algorithm.advantage"),
    ("devices", ["device=cuda"], "device"),
    ("model files", [*OWN_MODEL, "model.path={sliding}"], "model.path"),
    ("prompts", ["rollout.max_prompt_tokens=2"], "rollout.max_prompt_tokens"),
    ("code", ["reward=code"], "reward"),
    ("demonstrations", ["data.demonstrations=/no/such.jsonl"], "data.demonstrations"),
    ("teacher", ["algorithm=opd"], "teacher.path"),
    ("environment", ["environment._target_=no_such.Env"], "environment._target_"),
    ("reward", ["reward._target_=tests.reward.broken.raises"], "reward._target_"),
]


@pytest.mark.parametrize(("name", "overrides", "key"), REFUSED, ids=[row[0] for row in REFUSED])
def test_plan_doctor_and_start_refuse_the_same(
    name: str, overrides: list[str], key: str, tmp_path: Path, tiny_model: Path
) -> None:
    sliding = tmp_path / "sliding"
    if name == "model files":
        save_qwen3(sliding)
        config = json.loads((sliding / "config.json").read_text())
        slides = {"layer_types": None, "use_sliding_window": True, "sliding_window": 100}
        (sliding / "config.json").write_text(json.dumps(config | slides))
    (tmp_path / "file").touch()
    folder = tmp_path / ("file" if name == "disk" else "run")
    words = [word.format(folder=tmp_path, sliding=sliding) for word in overrides]

    for moment in {moment for check in CHECKS if check.name == name for moment in check.moments} - {CheckStage.start}:
        found = findings(RunInputs(composed(*words), moment, folder))
        failed = [each for each in found if each.status is CheckStatus.fail]
        assert [each.subject for each in failed] == [name]
        assert failed[0].message.startswith(f"{key}=")
    with pytest.raises(ConfigError) as refusal:
        preflight(composed(*words), folder)
    assert str(refusal.value).startswith(f"{key}=")


def test_nothing_is_downloaded_or_started_before_what_is_cheap_is_accepted(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "noisy.py").write_text("open('started', 'w').close()\ndef begin(*_): ...\n")
    monkeypatch.chdir(tmp_path)
    downloads: list[object] = []
    own = ("environment._target_=noisy.begin", "reward._target_=noisy.begin")
    with refused("rollout.max_prompt_tokens"):
        preflight(composed(*own, "rollout.max_prompt_tokens=2"))
    assert not (tmp_path / "started").exists()

    monkeypatch.setattr("app.start.inputs.locate", downloads.append)
    with refused("data.path", "none.jsonl"):
        preflight(composed("model=hf", "model.path=owner/name", "data.path=none.jsonl"))
    assert downloads == []


def test_the_steps_of_epochs_are_counted_from_the_prompts_that_are_left(tiny_model: Path, tmp_path: Path) -> None:
    rows = [{"question": f"{n}+1=", "answer": f"{n + 1}"} for n in range(40)]
    rows += [{"question": f"{'1+' * 300}1=", "answer": "301"} for _ in range(10)]  # longer than 512 tokens
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = [f"data.path={file}", "data.answer_after=null", "algorithm.prompts_per_step=16"]
    inputs = preflight(composed(*line, "epochs=2"))
    left = len(inputs.prompts.train)
    assert inputs.prompts.dropped > 0
    assert inputs.config.steps == -(-2 * left // 16)

    assert preflight(composed(*line, "epochs=2", "mode=eval")).config.steps == 60

    few = tmp_path / "few.jsonl"
    few.write_text("".join(json.dumps(row) + "\n" for row in rows[:10]))
    sets = [f"+data.train_sets.{path.stem}.path={path}" for path in (file, few)]
    inputs = preflight(composed(*sets, *line[1:], "epochs=1"))
    assert inputs.config.steps == -(-2 * inputs.prompts.counts.train["rows"] // 16)  # every second prompt is of `few`


def test_a_reward_is_tried_on_a_training_row_and_one_of_each_evaluation_set(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_levels.py").write_text(
        "def level(trajectories):\n"
        "    open('seen', 'a').write(f'{trajectories[0].prompt.row[\"level\"]} {trajectories[0].text}\\n')\n"
        "    return [1.0] * len(trajectories)\n"
    )
    monkeypatch.chdir(tmp_path)
    for name, level in (("train", 1), ("easy", 2), ("hard", 3)):
        row = json.dumps({"question": f"{level}+1=", "answer": str(level + 1), "level": level})
        (tmp_path / f"{name}.jsonl").write_text(row + "\n")
    overrides = (
        f"data.path={tmp_path}/train.jsonl",
        f"++data.eval_sets={{easy: {{path: {tmp_path}/easy.jsonl}}, hard: {{path: {tmp_path}/hard.jsonl}}}}",
        "reward._target_=my_levels.level",
    )
    inputs = preflight(composed(*overrides))
    assert (tmp_path / "seen").read_text().splitlines() == ["1 2", "2 3", "3 4"]
    assert next(inputs.prompts.train).id == "arithmetic/0@0"  # the stream is where it was

    (tmp_path / "seen").unlink()
    preflight(composed("mode=eval", *overrides))
    assert (tmp_path / "seen").read_text().splitlines() == ["2 3", "3 4"]


def test_the_driver_loads_the_inputs_of_the_tiny_model_without_torch(tiny_model: Path) -> None:
    """Its import takes seconds and 200 MB, and an engine's host never needs it."""
    code = """
import sys
import app.start.session, app.mode.train, app.weight_sync.synchronizer
from app.start.preflight import preflight
from tests.compose import composed
tokens = preflight(composed()).tokenizer("1+2=")["input_ids"]
print(len(tokens), "torch" in sys.modules)
"""
    assert python("-c", code).splitlines()[-1] == "4 False"


@pytest.mark.parametrize("tensors", [{"mtp.fc.weight"}, set()])
def test_a_model_drafts_with_a_head_that_its_checkpoint_has(tensors: set[str], tmp_path: Path) -> None:
    path = save_qwen35(tmp_path / "model")
    kept = {name: each for name, each in load_file(path / SINGLE).items() if not name.startswith("mtp.")}
    save_file(kept | {name: torch.ones(2) for name in tensors}, path / SINGLE)
    config = composed("device=cuda", *OWN_MODEL, f"model.path={path}", "rollout.speculative=mtp")
    with nullcontext() if tensors else refused("rollout.speculative", "mtp"):
        model_files(RunInputs(config, CheckStage.start))


def leave(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))


def test_a_run_whose_checkpoints_do_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = composed()
    model = architecture_of(config.model)
    assert model is not None
    needed = plan_disk(config, model).bytes
    assert needed == 4 * 12 * model.parameters + 4 * model.parameters  # two kept, the best, one being written

    folder = tmp_path / "not" / "made"
    leave(needed, monkeypatch)
    assert len([*disk(RunInputs(config, CheckStage.doctor, folder))]) == 1
    leave(needed - 1, monkeypatch)
    for moment in (CheckStage.doctor, CheckStage.start):
        with refused("hydra.run.dir", folder, " MiB for", "checkpoint.keep"):
            [*disk(RunInputs(config, moment, folder))]

    file = folder / "checkpoints" / "step_4" / "rank_0" / "model.safetensors"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"1")
    [*disk(RunInputs(config, CheckStage.doctor, folder))]  # that one makes room for the next

    keeps_nothing = composed("checkpoint.keep=0", "checkpoint.export=false")
    folder = tmp_path / "another"
    for each in (
        RunInputs(composed("mode=eval"), CheckStage.start, folder),
        RunInputs(keeps_nothing, CheckStage.start, folder),
        RunInputs(config, CheckStage.start),  # a job of a sweep
    ):
        [*disk(each)]


def test_free_space_is_that_of_the_nearest_folder_that_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    usage = shutil.disk_usage("/")

    def disk_usage(folder: Path) -> Any:
        asked.append(folder)
        return usage._replace(free=7)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    assert free_bytes(tmp_path / "not" / "made") == 7
    assert asked == [tmp_path]


GUESS = ["environment._target_=tests.mode.own_environments.Guess", "reward=environment"]


def workers() -> list[str]:
    """Command lines of the workers that this process has; one that was killed and not reaped yet has none."""
    lines = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            lines.append(" ".join(child.cmdline()))
    return [line for line in lines if "app.environment.worker" in line]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ([*GUESS, "environment.args.hint=colder"], ""),
        ([*GUESS, "environment.python=/no/such/python"], "/no/such/python"),
        (["environment._target_=tests.mode.dying_environment.Guess"], "(exit code 4); its last line: no license was f"),
    ],
)
def test_an_environment_that_cannot_be_loaded_is_one_sentence_and_leaves_no_process(
    settings: list[str], named: str, tiny_model: Path
) -> None:
    found = problems_of(*settings).get("environment", "")
    assert named in found
    assert (found == "", found.count("\n")) == (named == "", 0)
    assert workers() == []
