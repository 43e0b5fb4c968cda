"""Which folder and which settings a resumed run gets, and what is refused before anything is touched."""

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf, open_dict

from app.checkpoint.run_state import RunState, write_state
from app.config.model import LoraConfig
from app.errors import ConfigError, DamagedCheckpoint
from app.model.hf_directory import identity
from app.recovery.environment_references import save_references
from app.recovery.resume import EVALUABLE, RESUMABLE, SAVED, apply_evaluation, apply_preview, apply_resume
from tests.folders import a_run, content, run_app
from tests.folders import composed_by_hydra as composed
from tests.refusals import refused, require


def test_the_saved_configuration_wins_but_for_what_may_be_given_anew(tmp_path: Path) -> None:
    run = a_run(
        tmp_path / "run", "algorithm=dapo", "algorithm.group_size=4", "steps=10", "placement=fully_async", step=4
    )
    made = composed(
        f"hydra.run.dir={run}", "resume=auto", "steps=30", "algorithm.group_size=4",
        "placement.trainer_devices=2", "eval.every=7", "checkpoint.every=5",
        "tracking=tensorboard",
    )  # fmt: skip
    said = apply_resume(made).notes
    assert (made.algorithm.name, made.algorithm.group_size, made.placement.kind.name) == ("dapo", 4, "fully_async")
    assert (made.steps, made.placement.trainer_devices, made.eval.every) == (30, 2, 7)
    assert (made.trainer.lr, list(made.tracking.use)) == (2e-4, ["tensorboard"])
    assert said == ()


@pytest.mark.parametrize(
    ("override", "kept"),
    [
        ("trainer.lr=0.5", "trainer.lr=0.0002, not 0.5"),
        ("algorithm=gspo", "algorithm.name=grpo, not gspo"),
        ("experiment=cuda4_colocate_4b", "device.kind=cpu, not cuda"),
        ("+reward.args.bonus=1", "reward.args.bonus=null, not 1"),
        ("model.revision=main", "model.revision=null, not main"),
    ],
)
def test_an_override_that_would_change_the_run_is_refused_with_both_values(
    override: str, kept: str, tmp_path: Path
) -> None:
    run = a_run(tmp_path / "run", "algorithm=grpo", step=4)
    with pytest.raises(ConfigError) as caught:
        apply_resume(composed(f"resume={run}", "steps=9", override))
    require(caught.value, *override.lstrip("+").split("=", 1), str(run), kept, ", ".join(RESUMABLE))
    names_the_way = f"{shlex.quote(f'model.path={run}/export')} {shlex.quote(override)}" in caught.value.reason
    assert names_the_way != override.startswith("model.")


@pytest.mark.parametrize("exported", [True, False])
def test_the_way_to_another_learning_rate_is_a_command_that_composes(exported: bool, tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", "algorithm=dapo", step=4)
    overrides = ["algorithm=dapo", "trainer.lr=0.1", "resume=auto", "data.system='a b'", "steps=7"]
    (run / "config" / "overrides.yaml").write_text(OmegaConf.to_yaml(overrides))
    if exported:
        (run / "export").mkdir()
    with pytest.raises(ConfigError) as caught:
        apply_resume(composed(f"resume={run}", "trainer.lr=0.05"))

    *first, line = caught.value.reason.partition("optimizer: ")[2].split(" && ")
    assert [shlex.split(each) for each in first] == [
        ["python", "-m", "app", "mode=export", f"resume={run}"] for _ in range(not exported)
    ]
    made = composed(*shlex.split(line)[3:])
    assert (made.algorithm.name, made.steps, made.data.system, made.trainer.lr) == ("dapo", 7, "a b", 0.05)
    assert (made.model.path, made.resume) == (f"{run}/export", "never")


def test_the_same_presets_are_accepted_again_and_give_way_to_what_the_run_was_given(tmp_path: Path) -> None:
    presets = ["experiment=cuda4_colocate_4b", "algorithm=dapo", "trainer.lr=1e-5"]
    run = a_run(tmp_path / "run", *presets, "steps=70", "checkpoint.every=9", step=4)
    made = composed("resume=auto", f"hydra.run.dir={run}", *presets, "checkpoint.every=5")
    (note,) = apply_resume(made).notes
    assert note.startswith("experiment=cuda4_colocate_4b is ignored")
    assert note.endswith("steps")
    assert (made.steps, made.checkpoint.every, made.trainer.lr, made.algorithm.name) == (70, 5, 1e-5, "dapo")


def test_a_run_is_continued_in_its_own_folder_only(tmp_path: Path) -> None:
    run = a_run(tmp_path / "a run", step=4)
    with refused("hydra.run.dir", tmp_path / "other", f"'resume=\"{run}\"'"):
        apply_resume(composed(f'resume="{run}"', "steps=9", f"hydra.run.dir={tmp_path / 'other'}"))
    made = composed(f'resume="{run}"', "steps=9", f'hydra.run.dir="{run}"')
    apply_resume(made)
    assert made.hydra.run.dir == str(run)


def test_resume_auto_begins_a_run_where_there_is_none(tmp_path: Path) -> None:
    made = composed(f"hydra.run.dir={tmp_path / 'new'}", "resume=auto", "steps=3", "checkpoint.every=1")
    resumption = apply_resume(made)
    assert (resumption.notes, resumption.finished, resumption.checkpoint) == ((), False, None)
    assert made.steps == 3


def test_resume_auto_says_that_a_run_without_checkpoints_cannot_be_resumed_later(tmp_path: Path) -> None:
    line = [f"hydra.run.dir={tmp_path / 'new'}", "resume=auto"]
    (note,) = apply_resume(composed(*line, "checkpoint.keep=0")).notes
    assert "checkpoint.keep=0" in note
    (note,) = apply_resume(composed(*line)).notes
    assert "checkpoint.every=0" in note


def test_a_used_folder_is_refused_without_resume(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    with refused("hydra.run.dir", run, "resume=auto"):
        apply_resume(composed(f"hydra.run.dir={run}"))


@pytest.mark.parametrize("apply", [apply_resume, apply_preview])
def test_what_is_no_run_is_refused(apply: Callable[[DictConfig], object], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refused("resume", tmp_path / "file", "auto, never", str(SAVED)):
        apply(composed(f"resume={tmp_path / 'file'}"))


def test_a_checkpoint_may_be_named_instead_of_a_run(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", step=4)
    made = composed(f"resume={run}/checkpoints/step_4", "steps=9")
    resumption = apply_resume(made)
    assert (made.hydra.run.dir, resumption.checkpoint) == (str(run), run / "checkpoints" / "step_4")


@pytest.mark.parametrize(("steps", "finished"), [(4, True), (5, False)])
def test_a_finished_run_has_nothing_left_to_do(steps: int, finished: bool, tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", step=4, status="finished", accuracy=0.75)
    resumption = apply_resume(composed(f"resume={run}", f"steps={steps}"))
    assert (resumption.finished, resumption.accuracy) == (finished, 0.75 if finished else 0.0)


@pytest.mark.parametrize(
    ("status", "export", "steps", "finished"),
    [
        ("failed", "true", 4, False),
        ("interrupted", "false", 4, False),  # its last evaluation may be missing
        ("finished", "true", 4, True),
        ("failed", "true", 3, True),  # the checkpoint is not of the last step: there is nothing to export
    ],
)
def test_a_run_that_ended_after_its_last_step_but_did_not_finish_is_resumed(
    status: str, export: str, steps: int, finished: bool, tmp_path: Path
) -> None:
    run = a_run(tmp_path / "run", f"checkpoint.export={export}", "steps=4", step=4, status=status, reached=4)
    resumption = apply_resume(composed("resume=auto", f"hydra.run.dir={run}", "checkpoint.every=2", f"steps={steps}"))
    assert resumption.finished == finished
    assert resumption.checkpoint == (None if finished else run / "checkpoints" / "step_4")


@pytest.mark.parametrize(("status", "state"), [("interrupted", "is"), ("finished", "finished")])
def test_a_run_beyond_the_given_steps_is_called_finished_only_if_it_is(status: str, state: str, tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", "steps=9", step=4, status=status, reached=4)
    resumption = apply_resume(composed(f"resume={run}", "steps=3"))
    (note,) = resumption.notes
    assert f"{run} {state} at step 4" in note


@pytest.mark.parametrize(
    ("overrides", "finished", "epochs", "steps"),
    [
        ([], True, 2.0, 5),
        (["epochs=2"], True, 2.0, 5),  # the command of a scheduler that starts the run again
        (["epochs=4"], False, 4.0, 5),  # counted when the rows are loaded
        (["steps=9"], False, None, 9),
    ],
)
def test_a_run_of_epochs_is_continued_for_more_epochs_or_for_steps(
    overrides: list[str], finished: bool, epochs: float | None, steps: int, tmp_path: Path
) -> None:
    run = a_run(tmp_path / "run", "epochs=2", "steps=5", step=5, status="finished", reached=5)
    made = composed(f"resume={run}", *overrides)
    assert apply_resume(made).finished == finished
    assert (made.epochs, made.steps) == (epochs, steps)


def test_a_summary_that_cannot_be_read_hinders_no_resume(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", "steps=4", step=4, status="finished", reached=4)
    (run / "summary.json").write_text('{"status": "fin')
    resumption = apply_resume(composed(f"resume={run}"))
    assert (resumption.finished, resumption.checkpoint) == (False, run / "checkpoints" / "step_4")


def test_a_run_that_finished_without_a_checkpoint_is_finished_and_never_begun_again(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", "steps=3", status="finished", reached=3)
    names = ["resume=auto", f"hydra.run.dir={run}"]
    resumption = apply_resume(composed(*names))
    assert resumption.finished
    assert f"{run} finished at step 3" in resumption.notes[-1]
    with refused("steps", 9, str(run), "step 3", "hydra.run.dir"):
        apply_resume(composed(*names, "steps=9"))


def test_a_run_to_resume_that_has_no_checkpoint_is_refused_with_the_way_on(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    with refused("resume", run, "no checkpoint", f"resume=auto hydra.run.dir={run}"):
        apply_resume(composed(f"resume={run}"))


def test_resume_auto_starts_over_as_given_where_a_run_died_before_its_first_checkpoint(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", "trainer.lr=0.1")
    made = composed("resume=auto", f"hydra.run.dir={run}", "trainer.lr=0.2", "checkpoint.every=5")
    resumption = apply_resume(made)
    assert (resumption.finished, resumption.checkpoint, made.trainer.lr) == (False, None, 0.2)


ONE = "teacher.urls=[http://a:1]"
BY_SOURCE = "teacher.urls={arithmetic: [http://a:1]}"


@pytest.mark.parametrize(
    ("begun", "resumed", "accepted"),
    [
        (ONE, "teacher.urls=[http://b:1,http://c:1]", True),
        (ONE, "teacher.urls=null", False),
        (ONE, BY_SOURCE, False),
        (BY_SOURCE, "teacher.urls={arithmetic: [http://b:1]}", True),
        ("steps=8", ONE, False),
    ],
)
def test_a_teacher_may_move_but_not_come_or_go(begun: str, resumed: str, accepted: bool, tmp_path: Path) -> None:
    """Its term of the loss would, without a word."""
    run = a_run(tmp_path / "run", "algorithm=dapo", begun, step=4)
    made = composed(f"resume={run}", "steps=9", resumed)
    if accepted:
        apply_resume(made)
        assert made.teacher.urls != OmegaConf.load(run / SAVED).teacher.urls
    else:
        with refused("teacher.urls", None, str(run)):
            apply_resume(made)


def test_an_evaluation_is_no_run_to_resume(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", "mode=eval")
    with refused("resume", None, str(run), "mode=eval"):
        apply_resume(composed(f"resume={run}"))


def test_a_damaged_checkpoint_is_refused_if_it_was_named_and_else_left_to_the_run(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", step=4)
    (run / "checkpoints" / "step_4" / "state.json").write_text("{")
    with pytest.raises(DamagedCheckpoint, match=r"step_4 .*state\.json"):
        apply_resume(composed(f"resume={run}/checkpoints/step_4"))
    assert apply_resume(composed(f"resume={run}")).checkpoint is None


def test_a_configuration_of_another_version_is_refused(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", step=4)
    (run / SAVED).write_text((run / SAVED).read_text() + "unheard_of: 1\n")
    with refused("resume", run, "config.yaml", "unheard_of"):
        apply_resume(composed(f"resume={run}"))


def test_an_evaluation_takes_the_runs_settings_but_for_what_may_be_given_anew(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", "algorithm.group_size=4", "data.arithmetic.problems=50", "seed=3", step=4)
    made = composed("mode=eval", f"resume={run}", "eval.samples=2", "eval.temperature=1.0")
    resumption = apply_evaluation(made)
    assert (made.mode.name, made.algorithm.group_size, made.data.arithmetic.problems, made.seed) == ("eval", 4, 50, 3)
    assert (made.eval.samples, made.eval.temperature) == (2, 1.0)
    assert resumption.notes == ()
    assert resumption.checkpoint == run / "checkpoints" / "step_4"
    assert made.resume == str(run / "checkpoints" / "step_4")
    assert not Path(made.hydra.run.dir).is_relative_to(run)


def test_an_evaluation_with_settings_of_another_run_is_refused(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", "seed=3", step=4)
    with refused("seed", 1, str(run), "seed=3, not 1", ", ".join(EVALUABLE)):
        apply_evaluation(composed("mode=eval", f"resume={run}", "seed=1"))


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_checkpoint_that_is_not_there_is_refused_with_those_that_are(mode: str, tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", step=4)
    apply = apply_evaluation if mode == "eval" else apply_resume
    for name in ("step_3", "best"):
        with refused("resume", run / "checkpoints" / name, "step_4 is there"):
            apply(composed(f"mode={mode}", f"resume={run}/checkpoints/{name}"))
    (run / "checkpoints" / "best").write_text("step_4\n")
    resumption = apply(composed(f"mode={mode}", f"resume={run}/checkpoints/best"))
    assert resumption.checkpoint == run / "checkpoints" / "step_4"


def test_an_evaluation_on_other_data_takes_the_reward_and_the_sets_of_that_data_alone(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", "data=gsm8k", step=4)
    made = composed("mode=eval", f"resume={run}", "data=dapo_math")
    apply_evaluation(made)
    assert (made.data.name, list(made.data.eval_sets), list(made.reward.components)) == (
        "dapo_math",
        ["aime24"],
        ["math"],
    )
    plain = composed("mode=eval", f"resume={run}", "data=arithmetic")
    apply_evaluation(plain)
    assert (plain.data.name, list(plain.reward.components)) == ("arithmetic", ["exact"])


@pytest.mark.parametrize("given", [[], ["data=gsm8k"]])
def test_an_evaluation_may_add_a_set_of_its_own(given: list[str], tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", step=4)
    words = ["+data.eval_sets.mine.path=/x.jsonl", "+data.eval_sets.mine.rows=3", *given]
    for order in (words, words[::-1]):
        made = composed("mode=eval", f"resume={run}", *order)
        apply_evaluation(made)
        mine = made.data.eval_sets.mine
        assert (mine.path, mine.rows) == ("/x.jsonl", 3)


@pytest.mark.parametrize("named", ["/no/such/run", "the run", "its samples"])
def test_an_evaluation_of_what_is_no_checkpoint_is_refused(named: str, tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    (run / "samples").mkdir()
    resume = {"the run": str(run), "its samples": str(run / "samples")}.get(named, named)
    with refused("resume", resume, "mode=eval"):
        apply_evaluation(composed("mode=eval", f"resume={resume}"))


def test_the_command_writes_one_line(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", step=4, status="finished")
    before = content(run)
    code, text = run_app(f"resume={run}", "steps=4", cwd=tmp_path)
    assert (code, text.count("\n")) == (0, 1)
    assert f"{run} finished at step 4" in text
    assert content(run) == before
    _, sweep = run_app("-m", "resume=auto", "seed=0,1", cwd=tmp_path)
    assert "resume=auto" in sweep


def test_a_run_on_other_data_than_the_checkpoints_is_refused_before_anything_is_touched(
    tiny_model: Path, tmp_path: Path
) -> None:
    run = a_run(tmp_path / "run", "checkpoint.every=2", step=4)
    cursor = {"epoch": 0, "position": 0, "returned": [], "fingerprint": "another"}
    write_state(
        run / "checkpoints" / "step_4", RunState(4, 4, {"cursor": cursor}, identity(tiny_model, LoraConfig())), {}
    )
    before = content(run)
    (tmp_path / "go").touch()
    code, text = run_app(f"resume={run}/checkpoints/step_4", cwd=tmp_path, module="tests.mode.held_app")
    assert (code, content(run)) == (2, before)
    assert text.startswith("data is not accepted")


@pytest.mark.parametrize(
    "words", [["resume={run}"], ["resume={run}/checkpoints/step_4"], ["resume=auto", "hydra.run.dir={run}"]]
)
def test_a_preview_is_of_the_run_that_is_resumed(words: list[str], tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", "experiment=npu8_fully_async_9b", step=4)
    made = composed(*(word.format(run=run) for word in words), "mode=plan")
    apply_preview(made)
    assert (made.model.name, made.device.kind.name, made.placement.kind.name) == ("qwen35_9b", "npu", "fully_async")


def test_a_plan_of_an_evaluation_is_of_the_run_that_it_evaluates(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", "experiment=npu8_fully_async_9b", step=4)
    before = content(tmp_path)
    code, text = run_app("mode=eval", "data=gsm8k", f"resume={run}", "mode=plan", cwd=tmp_path)
    assert (code, text.splitlines()[0]) == (0, "qwen35_9b · grpo · fully_async on 8 npu device(s)")
    assert content(tmp_path) == before


# --- what may move, and what the environment says


def test_a_model_that_moved_is_given_anew(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", "steps=9", "model.path=/models/old", step=4)
    made = composed(f"resume={run}", "model.path=/models/new")
    apply_resume(made)
    assert made.model.path == "/models/new"


def a_saved_run(folder: Path, *overrides: str) -> Path:
    """A run whose configuration was saved as a run saves it."""
    run = a_run(folder, *overrides, step=4)
    job = composed(*overrides)
    with open_dict(job):
        del job["hydra"]
    raw, resolved = (OmegaConf.to_container(job, resolve=each, enum_to_str=True) for each in (False, True))
    (run / SAVED).write_text(OmegaConf.to_yaml(save_references(run, raw, resolved)))
    return run


def test_a_number_that_refers_to_the_environment_is_saved_as_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_LR", "1e-3")
    monkeypatch.setenv("MY_FLAG", "false")
    references = ["trainer.lr=${oc.env:MY_LR}", "data.shuffle=${oc.env:MY_FLAG}", "checkpoint.every=1"]
    run = a_saved_run(tmp_path / "run", *references)
    monkeypatch.setenv("MY_LR", "1e-5")
    monkeypatch.setenv("MY_FLAG", "true")
    made = composed(f"resume={run}")
    apply_resume(made)
    assert (made.trainer.lr, made.data.shuffle) == (1e-3, False)
    with refused("trainer.lr", None, "0.001"):
        apply_resume(composed(f"resume={run}", references[0]))


@pytest.mark.parametrize("now", ["theirs", None])
def test_a_text_of_the_environment_that_changed_is_refused(
    now: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SPLIT", "mine")
    monkeypatch.setenv("MY_PROJECT", "secret")
    given = ["data.subset=${oc.env:MY_SPLIT}", "tracking.project=${oc.env:MY_PROJECT}"]
    run = a_saved_run(tmp_path / "run", *given)
    texts = "".join(file.read_text() for file in (run / "config").iterdir())
    assert ("secret" in texts, "mine\n" in texts, "${oc.env:MY_SPLIT}" in texts) == (False, False, True)
    monkeypatch.setenv("MY_PROJECT", "another")  # which a resume may change
    made = composed(f"resume={run}")
    apply_resume(made)
    assert (made.data.subset, made.tracking.project) == ("mine", "another")

    monkeypatch.delenv("MY_SPLIT")
    if now is not None:
        monkeypatch.setenv("MY_SPLIT", now)
    with refused("data.subset", "${oc.env:MY_SPLIT}", str(run)):
        apply_resume(composed(f"resume={run}"))


def test_settings_of_an_earlier_version_that_chose_rows_are_left_out(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", "+data.eval_sets.mine.path=/x.jsonl", step=4)
    saved = OmegaConf.load(run / SAVED)
    saved.data.generator = "arithmetic"
    saved.data.arithmetic.max_operand = 50
    saved.data.eval_sets.mine.question = None
    OmegaConf.save(saved, run / SAVED)
    made = composed(f"resume={run}")
    apply_resume(made)
    assert (made.data.name, made.data.eval_sets.mine.path) == ("arithmetic", "/x.jsonl")

    saved.rollout.gone = 1
    OmegaConf.save(saved, run / SAVED)
    with refused("resume", run):
        apply_resume(composed(f"resume={run}"))
