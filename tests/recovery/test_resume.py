"""Which folder and which settings a resumed run gets, and what is refused before anything is touched."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf, open_dict

from app.checkpoint.run_state import RunState, write_state
from app.config.compose import setting_names
from app.config.model import LoraConfig
from app.errors import ConfigError, DamagedCheckpoint
from app.model.hf_directory import identity
from app.recovery import saved_config
from app.recovery.resume import EVALUABLE, RESUMABLE
from app.recovery.saved_config import SAVED
from app.start.output_folder import save_configuration
from app.start.settle import Job, settle
from app.tracking.run_folder import read_config
from tests.folders import a_run, composed_by_hydra, content, run_app
from tests.refusals import refused

NEW = Path("/nowhere/new")


def settled(*overrides: str, folder: Path = NEW) -> Job:
    """What the command with these overrides would run; a new run would be in `folder`."""
    given = [f"hydra.run.dir={folder}"] if folder != NEW else []
    return settle(composed_by_hydra(*overrides, *given), folder)


def test_the_saved_configuration_wins_but_for_the_overrides_which_are_printed(tmp_path: Path) -> None:
    begun = ["algorithm=dapo", "algorithm.group_size=4", "steps=10", "placement=fully_async"]
    run = a_run(tmp_path / "run", *begun, step=4)
    words = ["steps=30", "placement.trainer_devices=2", "eval.every=7", "checkpoint.every=5", "tracking=tensorboard"]
    job = settled("resume=auto", "algorithm.group_size=4", *words, folder=run)
    config = job.config
    assert (config.algorithm.name, config.algorithm.group_size) == ("dapo", 4)
    assert config.placement.kind.name == "fully_async"
    assert (config.steps, config.placement.trainer_devices, config.eval.every) == (30, 2, 7)
    assert (config.trainer.lr, list(config.tracking.use)) == (2e-4, ["tensorboard"])
    (note,) = job.resumption.notes
    assert "steps=30 (was 10)" in note
    assert "group_size" not in note
    assert job.resumption.checkpoint == run / "checkpoints" / "step_4"


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("trainer.lr=0.5", "trainer.lr"),
        ("seed=3", "seed"),
        ("algorithm=gspo", "algorithm.name"),
        ("placement=fully_async", "placement.kind"),
        ("experiment=cuda4_colocate_4b", None),
        ("+reward.args.bonus=1", "reward.args.bonus"),
        ("data.arithmetic.problems=50", "data.arithmetic.problems"),
        ("model.revision=main", "model.revision"),
    ],
)
def test_an_override_that_would_make_another_run_is_refused(override: str, key: str | None, tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", "algorithm=grpo", step=4)
    before = content(run)
    with pytest.raises(Exception, match=r"is not accepted") as caught:
        settled(f"resume={run}", "steps=9", override)
    assert key is None or vars(caught.value)["key"] == key
    assert content(run) == before


@pytest.mark.parametrize(
    "line", [["+reward.components.math=1", "~reward.components.exact"], ["data=gsm8k", "~data.eval_sets.test"]]
)
def test_what_a_line_removes_stays_removed_when_it_is_given_again(line: list[str], tmp_path: Path) -> None:
    line = [*line, "checkpoint.every=20"]
    run = a_run(tmp_path / "run", *line, step=4)
    job = settled("resume=auto", *line, folder=run)
    assert job.resumption.notes == ()
    assert {"exact", "test"}.isdisjoint({*job.config.reward.components, *job.config.data.eval_sets})


def test_a_run_is_continued_in_its_own_folder_only(tmp_path: Path) -> None:
    run = a_run(tmp_path / "a run", step=4)
    with refused("hydra.run.dir", tmp_path / "other"):
        settled(f'resume="{run}"', "steps=9", folder=tmp_path / "other")
    assert settled(f'resume="{run}"', "steps=9").folder == run
    above = f"{tmp_path}/../{tmp_path.name}/a run"
    assert settled(f'resume="{above}"', "steps=9", folder=run).resumption.checkpoint is not None
    assert settled(f'resume="{run}/checkpoints/step_4"', "steps=9").folder == run


def test_resume_auto_begins_a_run_where_there_is_none(tmp_path: Path) -> None:
    job = settled("resume=auto", "steps=3", "checkpoint.every=1", folder=tmp_path / "new")
    assert (job.folder, job.config.steps) == (tmp_path / "new", 3)
    assert (job.resumption.notes, job.resumption.accuracy, job.resumption.checkpoint) == ((), None, None)
    for saves_nothing in ("checkpoint.keep=0", "checkpoint.every=0"):
        (note,) = settled("resume=auto", saves_nothing, folder=tmp_path / "new").resumption.notes
        assert "checkpoint.every" in note


def test_what_is_no_run_or_a_used_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for mode in ("train", "plan"):
        with refused("resume", tmp_path / "file"):
            settled(f"resume={tmp_path / 'file'}", f"mode={mode}")
    run = a_run(tmp_path / "run")
    with refused("hydra.run.dir", run, "resume=auto"):
        settled(folder=run)
    (run / "hidden").mkdir()
    (run / SAVED).rename(run / "hidden" / "config.yaml")
    for mode in ("train", "eval"):
        with pytest.raises(ConfigError) as caught:
            settled(f"mode={mode}", "resume=auto", folder=run)
        assert (caught.value.key, "resume=" in caught.value.accepted) == ("hydra.run.dir", False)
    (run / "hidden" / "config.yaml").rename(run / SAVED)
    with refused("resume", run, "no checkpoint", f"resume=auto hydra.run.dir={run}"):
        settled(f"resume={run}")
    evaluation = a_run(tmp_path / "evaluation", "mode=eval")
    with refused("resume", None, "mode=eval"):
        settled(f"resume={evaluation}")


@pytest.mark.parametrize(
    ("status", "export", "steps", "finished"),
    [
        ("failed", "true", 4, False),
        ("interrupted", "false", 4, False),  # its last evaluation may be missing
        ("finished", "true", 4, True),
        ("finished", "true", 5, False),
        ("failed", "true", 3, True),  # the checkpoint is not of the last step: there is nothing to export
    ],
)
def test_a_run_that_ended_after_its_last_step_but_did_not_finish_is_resumed(
    status: str, export: str, steps: int, finished: bool, tmp_path: Path
) -> None:
    run = a_run(tmp_path / "run", f"checkpoint.export={export}", "steps=4", step=4, status=status, reached=4)
    resumption = settled("resume=auto", "checkpoint.every=2", f"steps={steps}", folder=run).resumption
    assert resumption.accuracy == (0.5 if finished else None)
    assert resumption.checkpoint == (None if finished else run / "checkpoints" / "step_4")


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
    job = settled(f"resume={run}", *overrides)
    assert (job.resumption.accuracy is not None) == finished
    assert (job.config.epochs, job.config.steps) == (epochs, steps)


def test_a_run_without_a_checkpoint_is_finished_or_starts_over_as_given(tmp_path: Path) -> None:
    done = a_run(tmp_path / "done", "steps=3", status="finished", reached=3)
    assert settled("resume=auto", folder=done).resumption.accuracy == 0.5
    with refused("steps", 9, str(done)):
        settled("resume=auto", "steps=9", folder=done)

    died = a_run(tmp_path / "died", "trainer.lr=0.1")
    job = settled("resume=auto", "trainer.lr=0.2", "checkpoint.every=5", folder=died)
    assert (job.resumption.accuracy, job.resumption.checkpoint, job.config.trainer.lr) == (None, None, 0.2)


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
    if accepted:
        job = settled(f"resume={run}", "steps=9", resumed)
        assert job.resumption.settings.teacher.urls != OmegaConf.load(run / SAVED).teacher.urls
        return
    with pytest.raises(Exception, match="is not accepted") as caught:
        settled(f"resume={run}", "steps=9", resumed)
    assert vars(caught.value)["key"].startswith("teacher.urls")


def test_a_damaged_checkpoint_is_refused_if_it_was_named_and_else_left_to_the_run(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", step=4)
    (run / "checkpoints" / "step_4" / "state.json").write_text("{")
    with pytest.raises(DamagedCheckpoint, match=r"step_4 .*state\.json"):
        settled(f"resume={run}/checkpoints/step_4")
    assert settled(f"resume={run}").resumption.checkpoint is None


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_checkpoint_that_is_not_there_is_refused_with_those_that_are(mode: str, tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", step=4)
    for name in ("step_3", "best"):
        with refused("resume", run / "checkpoints" / name, "step_4 is there"):
            settled(f"mode={mode}", f"resume={run}/checkpoints/{name}")
    (run / "checkpoints" / "best").write_text("step_4\n")
    resumption = settled(f"mode={mode}", f"resume={run}/checkpoints/best").resumption
    assert resumption.checkpoint == run / "checkpoints" / "step_4"


def test_a_configuration_of_another_version_is_refused(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", step=4)
    OmegaConf.save({"placement": "unheard_of"}, run / SAVED)
    with refused("resume", run):
        settled(f"resume={run}")


# --- evaluations and previews


def test_an_evaluation_takes_the_runs_settings_but_for_what_may_be_given_anew(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", "algorithm.group_size=4", "data.arithmetic.problems=50", "seed=3", step=4)
    job = settled("mode=eval", f"resume={run}", "eval.samples=2", "eval.temperature=1.0")
    config = job.config
    assert (config.mode.name, config.algorithm.group_size, config.data.arithmetic.problems) == ("eval", 4, 50)
    assert (config.seed, config.eval.samples, config.eval.temperature) == (3, 2, 1.0)
    assert (job.resumption.checkpoint, job.folder) == (run / "checkpoints" / "step_4", NEW)
    assert config.resume == str(job.resumption.checkpoint)
    with refused("seed", 1, str(run)):
        settled("mode=eval", f"resume={run}", "seed=1")


def test_an_evaluation_on_other_data_takes_the_reward_and_the_sets_of_that_data_alone(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", "data=gsm8k", step=4)
    config = settled("mode=eval", f"resume={run}", "data=dapo_math").config
    assert (config.data.name, list(config.data.eval_sets)) == ("dapo_math", ["aime24"])
    assert list(config.reward.components) == ["math"]
    config = settled("mode=eval", f"resume={run}", "data=arithmetic").config
    assert (config.data.name, list(config.reward.components)) == ("arithmetic", ["exact"])


@pytest.mark.parametrize("given", [[], ["data=gsm8k"]])
def test_an_evaluation_may_add_a_set_of_its_own(given: list[str], tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", step=4)
    words = ["+data.eval_sets.mine.path=/x.jsonl", "+data.eval_sets.mine.rows=3", *given]
    for order in (words, words[::-1]):
        mine = settled("mode=eval", f"resume={run}", *order).config.data.eval_sets["mine"]
        assert (mine.path, mine.rows) == ("/x.jsonl", 3)


def test_an_evaluation_of_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    (run / "samples").mkdir()
    for named in (Path("/no/such/run"), run, run / "samples"):
        with refused("resume", named):
            settled("mode=eval", f"resume={named}")


@pytest.mark.parametrize(
    "words", [["resume={run}"], ["resume={run}/checkpoints/step_4"], ["resume=auto", "hydra.run.dir={run}"]]
)
def test_a_preview_is_of_the_run_that_is_resumed(words: list[str], tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", "experiment=npu8_fully_async_9b", step=4)
    folder = run if "resume=auto" in words else NEW
    job = settle(composed_by_hydra(*(word.format(run=run) for word in words), "mode=plan"), folder)
    config = job.config
    assert (config.model.name, config.device.kind.name) == ("qwen35_9b", "npu")
    assert (job.mode.name, job.folder, job.given_folder) == ("plan", run, run)


# --- whole commands


def test_the_command_writes_one_line_for_a_finished_run_and_refuses_a_resuming_sweep(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", step=4, status="finished")
    before = content(tmp_path)
    code, text = run_app(f"resume={run}", "steps=4", cwd=tmp_path)
    assert (code, text.count("step 4")) == (0, 1)
    assert content(tmp_path) == before
    code, text = run_app("-m", "resume=auto", "seed=0,1", cwd=tmp_path)
    assert (code, "resume=auto" in text) == (1, True)


def test_a_run_on_other_data_than_the_checkpoints_is_refused_before_anything_is_touched(
    tiny_model: Path, tmp_path: Path
) -> None:
    run = a_run(tmp_path / "run", "checkpoint.every=2", step=4)
    cursor = {"epoch": 0, "position": 0, "returned": [], "fingerprint": "another"}
    write_state(
        run / "checkpoints" / "step_4", RunState(4, 4, {"cursor": cursor}, identity(tiny_model, LoraConfig())), {}
    )
    before = content(tmp_path)
    (tmp_path / "go").touch()
    code, text = run_app(f"resume={run}/checkpoints/step_4", cwd=tmp_path, module="tests.mode.held_app")
    (tmp_path / "go").unlink()
    assert (code, content(tmp_path)) == (2, before)
    assert text.splitlines()[-1].startswith("data is not accepted")


def test_a_resumed_run_keeps_the_overrides_of_its_start_and_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, start, elsewhere = (tmp_path / name for name in ("run", "start", "elsewhere"))
    for each in (run, start, elsewhere):
        each.mkdir()
    monkeypatch.chdir(start)
    save_configuration(settled("steps=9", "algorithm.group_size=4", folder=run), 9)
    monkeypatch.chdir(elsewhere)
    (a_run(tmp_path / "other", step=4) / "checkpoints").rename(run / "checkpoints")
    save_configuration(settled(f"resume={run}", "steps=12"), 12)
    assert read_config(run)[1] == ["algorithm.group_size=4", f"resume={run}", "steps=12"]
    assert OmegaConf.load(run / "config" / "hydra.yaml").hydra.runtime.cwd == str(start)


# --- what may move, and what the environment says


def test_a_model_that_moved_is_given_anew(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", "steps=9", "model=qwen3_4b", "model.path=me/old", step=4)
    assert settled(f"resume={run}", "model.path=me/new").config.model.path == "me/new"


def a_saved_run(folder: Path, *overrides: str) -> Path:
    """A run whose configuration was saved as a run saves it."""
    run = a_run(folder, *overrides, step=4)
    settings = composed_by_hydra(*overrides)
    with open_dict(settings):
        del settings["hydra"]
    saved_config.save(settings, run)
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
    config = settled(f"resume={run}").config
    assert (config.trainer.lr, config.data.shuffle) == (1e-3, False)
    with refused("trainer.lr", None, "0.001"):
        settled(f"resume={run}", references[0])


def test_a_text_of_the_environment_is_saved_as_its_reference_and_may_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    run = a_saved_run(tmp_path / "run", "data.subset=${oc.env:JUDGE_KEY}")
    texts = "".join(file.read_text() for file in (run / "config").iterdir())
    assert ("secret" in texts, "${oc.env:JUDGE_KEY}" in texts) == (False, True)
    monkeypatch.setenv("JUDGE_KEY", "renewed")
    assert settled(f"resume={run}").config.data.subset == "renewed"


def test_a_line_that_refers_to_a_secret_is_given_again_without_telling_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "x7-of-mine"
    monkeypatch.setenv("TOK", secret)
    line = [
        "tracking.use=[my.Tracker]",
        "+tracking.args.token=${oc.env:TOK}",
        "+tracking.args.header='Bearer ${tracking.args.token}'",
    ]
    run = a_saved_run(tmp_path / "run", "checkpoint.every=1", *line)
    saved = OmegaConf.to_container(OmegaConf.load(run / SAVED), resolve=False)
    assert saved["tracking"]["args"] == {"token": "${oc.env:TOK}", "header": "Bearer ${tracking.args.token}"}  # type: ignore[index, call-overload]

    job = settled(f"resume={run}", *line, "+tracking.args.other=${oc.env:TOK}")
    assert job.config.tracking.args == {"token": secret, "other": secret, "header": f"Bearer {secret}"}
    assert "tracking.args.other=${oc.env:TOK}" in job.resumption.notes[0]
    save_configuration(job, job.config.steps)
    written = [*job.resumption.notes, *(file.read_text() for file in (run / "config").iterdir())]
    assert secret not in "".join(written)


def test_an_override_replaces_a_reference_whose_variable_is_not_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("D", "MY_PROJECT", "MY_SPLIT"):
        monkeypatch.setenv(name, "there")
    given = ["tracking.project=${oc.env:MY_PROJECT}", "data.subset=${oc.env:MY_SPLIT}"]
    run = a_saved_run(tmp_path / "run", "data=rows", "data.path=${oc.env:D}/a.jsonl", *given)
    monkeypatch.delenv("D")
    monkeypatch.delenv("MY_PROJECT")
    words = ["data.path=/x.jsonl", "tracking.project=mine"]
    job = settled("mode=eval", f"resume={run}", *words)
    assert (job.config.data.path, job.config.data.subset, job.config.tracking.project) == ("/x.jsonl", "there", "mine")
    with refused("data.path", "/x.jsonl"):
        settled(f"resume={run}", *words)
    monkeypatch.setenv("D", "there")
    with refused("tracking.project", None, "MY_PROJECT"):
        settled(f"resume={run}")


def test_settings_of_another_version_are_refused(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", step=4)
    saved = OmegaConf.load(run / SAVED)
    OmegaConf.update(saved, "trainer.beta1", 0.9, force_add=True)
    OmegaConf.save(saved, run / SAVED)
    with refused("resume", run, "beta1"):
        settled(f"resume={run}")


def test_what_a_resume_may_change_are_settings() -> None:
    assert {*RESUMABLE, *EVALUABLE} <= {*setting_names()}
