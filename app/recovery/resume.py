"""What `resume=` means for a new process: the folder, the settings, and whether anything is left to do.

The saved configuration wins, so that a run keeps its identity. A training run may override only settings that cannot
affect the learned policy (`RESUMABLE`), an evaluation those that do not change the model (`EVALUABLE`). An override
that would change another one is refused.

Invariants:
- Nothing here writes. Whatever is refused is refused before a folder is touched.
"""

import shlex
from collections.abc import Collection, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from app.checkpoint.export import FOLDER as EXPORT
from app.checkpoint.folder import FOLDER, LATEST, find, latest, list_checkpoints, named
from app.checkpoint.run_state import STATE, read_state
from app.config import Mode, RunConfig
from app.config.command_line import command, override
from app.config.compose import absolute_paths, config_error
from app.config.stop import StopConfig
from app.errors import ConfigError, DamagedCheckpoint, yaml_text
from app.recovery.environment_references import require_same_environment
from app.stop import stop_reason
from app.tracking.run_folder import CONFIG, flatten, metrics_file, summary

NEVER = "never"
AUTO = "auto"
SAVED = Path(CONFIG) / "config.yaml"
RESULTS = (metrics_file.NAME, "parity.json")  # a folder with one of them holds a run
TEACHER = "teacher.urls"
RESUMABLE = (
    "steps",
    "epochs",
    "checkpoint",
    "cluster",
    "eval.every",
    "model.chat_template",  # these files may move: the checkpoint identifies what is in them
    "model.path",
    "offload",
    "placement.devices",
    "placement.trainer_devices",
    "placement.rollout_devices",
    "trainer.profile_steps",
    "recovery",
    "stop",
    "teacher.devices",
    "teacher.timeout_s",
    TEACHER,
    "rollout.memory_fraction",
    "rollout.max_inflight_groups",
    "rollout.port",
    "rollout.stall_timeout_s",
    "rollout.start_timeout_s",
    "rollout.urls",
    "tracking",
    "trainer.activation_checkpointing",
    "trainer.compile",
    "trainer.timeout_s",
    "trainer.tokens_per_microbatch",
    "weight_sync",
)
EVALUABLE = (
    "cluster",
    "data",
    "device",
    "eval",
    "model.path",
    "placement",
    "recovery",
    "reward",
    "rollout",
    "tracking",
)
ALWAYS = ("hydra", "mode", "resume")  # never taken from the saved configuration


@dataclass(frozen=True, slots=True)
class Resumption:
    """What `resume=` means for this start."""

    notes: tuple[str, ...] = ()  # for the screen
    finished: bool = False  # nothing is left to do with these `steps`
    accuracy: float = 0.0  # of the last evaluation, if nothing is left
    checkpoint: Path | None = None  # to start from; None also if the latest is damaged and the run picks another


def apply_resume(composed: DictConfig) -> Resumption:
    """Replace `composed` by the configuration of the run to resume, if there is one.

    Raises:
        ConfigError: `resume` names no run, the run has no checkpoint, or the folder is used and `resume=never`.
        CheckpointError: The checkpoint that `resume` names is incomplete.
    """
    resume = str(composed.resume)
    folder = _run_dir(composed)
    if resume == NEVER:
        require_unused(folder, composed.mode)
        return Resumption()

    if resume == AUTO:
        notes = _warnings_of_auto(composed)
        if not (folder / SAVED).is_file():
            require_unused(folder)
            return Resumption(notes)
    else:
        notes = ()
        folder = _folder_of(resume)
        _require_its_own_folder(composed, folder)
        with read_write(composed.hydra):
            composed.hydra.run.dir = str(folder)

    saved = _saved(folder)
    _take_over_mode(composed, saved, folder)

    if checkpoint_of(resume) is None and not has_checkpoint(folder):
        return _without_checkpoint(composed, saved, folder, notes)

    notes = (*notes, *_take_over(composed, saved, folder, RESUMABLE))
    checkpoint = _readable(resume, folder)
    if checkpoint is None:
        return Resumption(notes)
    step = read_state(checkpoint).step
    steps = int(composed.steps)
    if composed.epochs not in (None, saved.epochs):  # the steps are counted with the rows
        return Resumption(notes, checkpoint=checkpoint)
    # A run that ended after its last step may still have to evaluate and export it.
    if step > steps or (step == steps and summary.is_finished(folder)):
        return _finished(folder, step, notes)
    if reason := _stopped(composed, folder, step):
        return _finished(folder, step, notes, reason)
    return Resumption(notes, checkpoint=checkpoint)


def _take_over_mode(composed: DictConfig, saved: DictConfig, folder: Path) -> None:
    """Continue a supervised run as such. Raises `ConfigError` if another mode is given than the run's."""
    if saved.mode.trains and "mode" not in _given(composed):
        composed.mode = saved.mode
    if saved.mode is not composed.mode:
        raise ConfigError("resume", composed.resume, reason=f"{folder} holds a run of mode={saved.mode.name}")


def _require_same_teacher(composed: DictConfig, saved: DictConfig, folder: Path) -> None:
    """Raise `ConfigError` unless the same prompts have a teacher: its servers may move, not come or go."""

    def taught(urls: Any) -> set[str] | bool:
        return {str(source) for source in urls} if isinstance(urls, Mapping) else bool(urls)

    given, kept = composed.teacher.urls, saved.teacher.urls
    if taught(given) != taught(kept):
        accepted = "servers of the same teachers" if kept else "null"
        urls: Any = OmegaConf.to_container(kept) if OmegaConf.is_config(kept) else kept
        why = f"the run in {folder} has teacher.urls={yaml_text(urls)}"
        raise ConfigError(TEACHER, given, accepted, why)


def apply_evaluation(composed: DictConfig) -> Resumption:
    """Replace `composed` by the configuration of the run whose checkpoint `mode=eval resume=…` evaluates.

    Raises:
        ConfigError: `resume` names no checkpoint, or the evaluation's own folder is used.
    """
    resume = str(composed.resume)
    checkpoint = None
    notes: tuple[str, ...] = ()
    if resume != NEVER:
        run, checkpoint = evaluated(resume)
        notes = _take_over(composed, _saved(run), run, EVALUABLE)
        composed.resume = str(checkpoint.absolute())  # of a run that is still training, the latest changes

    require_unused(_run_dir(composed), Mode.eval)
    return Resumption(notes, checkpoint=checkpoint)


def apply_preview(composed: DictConfig) -> None:
    """Replace `composed` by the configuration of the run that `resume` names, as the run itself would.

    For `mode=plan` and `mode=doctor`, which say what that run needs.

    Raises:
        ConfigError: `resume` names no run, or an override would change a setting that must stay.
    """
    resume = str(composed.resume)
    folder = _run_dir(composed) if resume in (NEVER, AUTO) else _folder_of(resume)
    if resume != NEVER and (folder / SAVED).is_file():
        saved = _saved(folder)
        _take_over(composed, saved, folder, (*RESUMABLE, *EVALUABLE))
        if saved.mode is Mode.sft:
            composed.mode = Mode.sft


def evaluated(resume: str) -> tuple[Path, Path]:
    """Return the run and the checkpoint that `mode=eval resume=…` names. Raises `ConfigError` if it names none."""
    path = Path(resume).expanduser()
    run = next((each for each in (path, *path.parents[:3]) if (each / SAVED).is_file()), None)
    of_run = run == path or path.parent.name == FOLDER or (path / STATE).is_file()
    checkpoint = find(path) if of_run else None
    if run is None or checkpoint is None:
        accepted = "with mode=eval the folder of a run that has checkpoints, or one of its checkpoints"
        raise ConfigError("resume", resume, accepted, list_checkpoints(path) if run is not None and of_run else "")
    return run, checkpoint


def require_unused(folder: Path, mode: Mode | None = None) -> None:
    """Raise `ConfigError` if the folder already holds a run. The sentence says what to do instead in this mode."""
    if not holds_run(folder):
        return

    accepted = "another folder"
    if mode is not None and mode.trains:
        accepted = "resume=auto to continue it, or another folder"
    elif mode is Mode.eval:
        accepted = f"another folder, or {override('resume', folder)} without hydra.run.dir to evaluate that run"
    raise ConfigError("hydra.run.dir", folder, accepted, "it already holds a run")


def holds_run(folder: Path) -> bool:
    """Whether a run left results in the folder. The logs of a run that failed at its start do not count."""
    files = [folder / name for name in RESULTS]
    return has_checkpoint(folder) or any(file.is_file() and file.stat().st_size for file in files)


def has_checkpoint(folder: Path) -> bool:
    """Whether the run in the folder committed a checkpoint, intact or not."""
    return (folder / FOLDER / LATEST).is_file()


def checkpoint_of(resume: str) -> Path | None:
    """Return the checkpoint that `resume=` names, if it names a checkpoint, the latest or the best, and not a run."""
    return named(Path(resume))


def _warnings_of_auto(composed: DictConfig) -> tuple[str, ...]:
    checkpoint = composed.checkpoint
    if not checkpoint.keep:
        return ("resume=auto: this run saves no checkpoint to resume from (checkpoint.keep=0)",)
    if not checkpoint.every:
        return (
            "resume=auto: checkpoint.every=0 saves only the last step and the best one, so a run that is killed loses "
            "the steps since then; give checkpoint.every=…",
        )
    return ()


def _without_checkpoint(composed: DictConfig, saved: DictConfig, folder: Path, notes: tuple[str, ...]) -> Resumption:
    """Decide what to do with a run that has no checkpoint."""
    finished = summary.is_finished(folder)
    done = int(summary.read(folder).get("steps", 0))
    steps = int(composed.steps if "steps" in _given(composed) else saved.steps)

    reason = _stopped(saved, folder, done)
    if finished and (done >= steps or reason):
        return _finished(folder, done, notes, reason)
    if finished:
        why = f"the run in {folder} finished at step {done} and left no checkpoint to continue from"
        raise ConfigError("steps", steps, "another hydra.run.dir", why)
    if str(composed.resume) != AUTO:
        accepted = (
            f"hydra.run.dir=<a new folder> to start it again, or resume=auto {override('hydra.run.dir', folder)}, "
            "which sets its records aside"
        )
        raise ConfigError("resume", composed.resume, accepted, f"the run in {folder} has no checkpoint")
    return Resumption(notes)  # starts over


def _take_over(composed: DictConfig, saved: DictConfig, folder: Path, changeable: Collection[str]) -> tuple[str, ...]:
    """Copy the saved settings into `composed`, except the overrides that are allowed.

    Returns:
        One sentence for each preset whose other values of such settings are ignored.

    Raises:
        ConfigError: An override would change a setting that must stay.
    """
    require_same_environment(saved, folder, changeable)
    given = _given(composed)
    notes = _checked(given, composed, saved, folder, changeable)
    if "data" in given and "data" in changeable:
        given = {**given, "reward": ""}  # a data preset selects its reward
    # Copies, since the sections of `composed` are overwritten in place below.
    keys = {_in_saved(key, saved) for key in given if _is_in(key, changeable)}
    allowed = {key: deepcopy(OmegaConf.select(composed, key)) for key in sorted(keys, key=lambda key: key.count("."))}

    with open_dict(composed):
        for key in saved:
            if key not in ALWAYS:
                composed[key] = saved[key]
        for key, value in allowed.items():
            OmegaConf.update(composed, key, value, merge=False)
        if "steps" in given and "epochs" not in given:
            composed.epochs = None
    if TEACHER in changeable:
        _require_same_teacher(composed, saved, folder)
    return notes


def _in_saved(key: str, saved: DictConfig) -> str:
    """Return the setting, or the part of it that the saved run lacks as a whole: an evaluation set, say."""
    names = key.split(".")
    sections = (".".join(names[:count]) for count in range(1, len(names)))
    return next((section for section in sections if OmegaConf.select(saved, section) is None), key)


def _checked(
    given: Mapping[str, str], composed: DictConfig, saved: DictConfig, folder: Path, changeable: Collection[str]
) -> tuple[str, ...]:
    """Compare what the command line overrides with the saved settings. Returns and raises as `_take_over`."""
    keys = [key for key in given if not _is_in(key, (*changeable, *ALWAYS))]
    if not keys:
        return ()

    ours, theirs = _leaves(composed), _leaves(saved)
    notes: list[str] = []
    for key in keys:
        differing = _differing(key, given, composed, ours, theirs)
        for name in differing:
            if not _is_in(name, changeable):
                why = (
                    f"the run in {folder} keeps {name}={yaml_text(theirs.get(name))}, not {yaml_text(ours.get(name))}; "
                    f"only these settings may differ from the run's: {', '.join(changeable)}"
                    f"{_new_run(folder, key, given[key]) if changeable is RESUMABLE else ''}"
                )
                raise ConfigError(key, given[key].partition("=")[2], reason=why)
        if differing:
            kept = ", ".join(differing)
            notes.append(f"{given[key]} is ignored where the run was given other values: it keeps {kept}")
    return tuple(notes)


def _differing(
    key: str, given: Collection[str], composed: DictConfig, ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> list[str]:
    """Return the settings that an override sets to other values than the run's.

    Args:
        key: A setting, or a group, whose preset is compared as a whole: `experiment` with every setting.
        given: All overridden keys. Settings that a finer one names are left out.
        composed: The configuration with the overrides.
        ours: Its settings.
        theirs: Those of the run.
    """
    names = [name for name in {**theirs, **ours} if ours.get(name) != theirs.get(name) and not _is_in(name, ALWAYS)]
    finer = [other for other in given if other in composed or "." in other]
    # A group without a section, whose presets set anything: `experiment`, or one of the user's.
    if key in composed or "." in key:
        names = [name for name in names if _is_in(name, [key])]
        finer = [other for other in finer if other.startswith(f"{key}.")]
    return [name for name in names if name == key or not _is_in(name, finer)]


def _new_run(folder: Path, key: str, given: str) -> str:
    """Name the command of a run that starts from this one's model with an override that cannot be resumed with."""
    if key.partition(".")[0] == "model":
        return ""
    saved = folder / CONFIG / "overrides.yaml"
    overrides: Any = OmegaConf.to_container(OmegaConf.load(saved)) if saved.is_file() else []
    replaced = {key, "model.path", *ALWAYS}
    kept = [shlex.quote(each) for each in overrides if each.lstrip("+~").partition("=")[0] not in replaced]

    line = command(*kept, override("model.path", folder / EXPORT), shlex.quote(given))
    if not (folder / EXPORT).is_dir():
        line = f"{command('mode=export', override('resume', folder))} && {line}"
    return f"; another run can start from its model, with a new optimizer: {line}"


def _given(composed: DictConfig) -> dict[str, str]:
    """Return what the command line overrides: key → the override as written."""
    overrides = [str(each) for each in composed.hydra.overrides.task]
    return {each.lstrip("+~").split("=", 1)[0]: each for each in overrides}


def _readable(resume: str, folder: Path) -> Path | None:
    """Return the checkpoint that `resume` names, or the latest; None if that is damaged: the run takes an older one."""
    named = checkpoint_of(resume)
    try:
        checkpoint = named or latest(folder)
        if checkpoint is not None:
            read_state(checkpoint)
        return checkpoint
    except DamagedCheckpoint:
        if named is not None:
            raise
        return None


def _stopped(composed: DictConfig, folder: Path, step: int) -> str | None:
    """Return why the finished run in the folder, continued with these settings, would stop early where it ended."""
    if not summary.is_finished(folder) or summary.read(folder).get("steps") != step:
        return None
    rows = metrics_file.read(folder / metrics_file.NAME)
    accuracies = {row["step"]: row["eval/accuracy"] for row in rows if row.get("eval/accuracy") is not None}
    stop = StopConfig(composed.stop.at_accuracy, composed.stop.patience)
    return stop_reason(stop, accuracies, step=step, last_step=int(composed.steps))


def _finished(folder: Path, step: int, notes: tuple[str, ...], stopped: str | None = None) -> Resumption:
    state = "finished" if summary.is_finished(folder) else "is"
    note = f"the run in {folder} {state} at step {step}: give a larger steps=… to continue it."
    if stopped:
        note = f"the run in {folder} stopped early ({stopped}): change that setting, or give null, to continue it."
    return Resumption((*notes, note), finished=True, accuracy=summary.accuracy(summary.read(folder)))


def _saved(folder: Path) -> DictConfig:
    """Load the configuration of a run with today's schema."""
    try:
        saved = _with_todays_schema(OmegaConf.load(folder / SAVED))
    except OmegaConfBaseException as error:
        why = f"{SAVED} is not a configuration of this version: {config_error(error)}"
        raise ConfigError("resume", folder, reason=why) from error
    assert isinstance(saved, DictConfig)
    return saved


def _with_todays_schema(saved: Any) -> Any:
    """Merge saved settings into the schema, without those of earlier versions that chose rows.

    A resume compares the rows themselves with the checkpoint.
    """
    try:
        return OmegaConf.merge(OmegaConf.structured(RunConfig), saved)
    except ConfigKeyError as error:
        section, _, name = str(error.full_key).rpartition(".")
        if section.partition(".")[0] != "data":
            raise
        del OmegaConf.select(saved, section)[name]
        return _with_todays_schema(saved)


def _folder_of(resume: str) -> Path:
    """Return the folder of the run that `resume=` names. Raises `ConfigError` if it names none, or no checkpoint."""
    path = Path(resume)
    of_checkpoint = path.parent.name == FOLDER
    folder = path.parent.parent if of_checkpoint else path
    if not (folder / SAVED).is_file():
        accepted = f"auto, never, a run's folder (with {SAVED} in it) or one of its checkpoints"
        raise ConfigError("resume", resume, accepted)
    if of_checkpoint and checkpoint_of(resume) is None:
        raise ConfigError("resume", resume, "one of the run's checkpoints or its folder", list_checkpoints(path))
    return folder


def _require_its_own_folder(composed: DictConfig, folder: Path) -> None:
    """Raise `ConfigError` if the command line gives another folder than that of the run to resume."""
    given: Any = OmegaConf.to_container(composed.hydra.run, resolve=False)
    if "${" in given["dir"] or Path(given["dir"]).absolute() == folder.absolute():  # the default, or the same
        return
    why = f"{override('resume', composed.resume)} continues the run in its own folder; leave hydra.run.dir out"
    raise ConfigError("hydra.run.dir", given["dir"], reason=why)


def _run_dir(composed: DictConfig) -> Path:
    return Path(str(composed.hydra.run.dir))


def _is_in(key: str, names: Collection[str]) -> bool:
    """Whether a key is one of the settings or sections `names`, or below one."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _leaves(config: DictConfig) -> dict[str, Any]:
    """Return the settings of a configuration by their dotted names, those that it leaves to the schema included."""
    known: Any = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    with suppress(OmegaConfBaseException):  # a setting that this version does not know: compared as it is
        known = OmegaConf.merge(OmegaConf.structured(RunConfig), OmegaConf.to_container(known, resolve=True))
    plain = flatten(absolute_paths(OmegaConf.to_container(known, resolve=True, enum_to_str=True)))
    return {key: value if isinstance(value, list) else yaml_text(value) for key, value in plain.items() if value != {}}
