"""Load all rows of a run, training sets and evaluation sets, before templating and tokenization.

    data.path, data.train_sets, data._target_ ──→ field map ──→ distinct ──→ training rows
    the tasks of an environment ────────────────→ field map ──→ distinct ──→ training rows
                                       (null) ──→ generated problems ──────→ training rows + held-out rows

    evaluation ── data.eval_path, or data.eval_sets.<name>.path ───→ rows of its own
               ── data.path is a hub data set ─────────────────────→ its other splits
               ── else ────────────────────────────────────────────→ held-out training rows (eval_fraction)

Invariants:
- Training rows and held-out rows are disjoint.
- The held-out rows of a file are the same for every seed, so that runs are comparable.
- An evaluation set that shares questions with the training set causes a warning.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from app.config.data import DataConfig, EvalSetConfig, Generator, TrainSetConfig
from app.data import generators, user_rows
from app.data.fields import FieldMap, Row
from app.data.reading import BrokenRows, Setting, read_rows
from app.data.records import sources
from app.data.records.formats import Record, Records
from app.data.records.messages import REPLY
from app.errors import ConfigError, yaml_text

DEFAULT_EVAL_SET = "eval"
# Independent of the run's seed: runs with different seeds are evaluated on the same rows.
HELD_OUT_SEED = 0
MIN_ROWS = 2  # of a training set out of which some are held

Tasks = Sequence[Mapping[str, Any]]  # rows that an environment lists


@dataclass(frozen=True, slots=True)
class DataRows:
    """All rows of a run. No list is empty."""

    train: list[Row]
    evals: dict[str, list[Row]]  # by evaluation set
    warnings: list[str]  # for the run to record
    held_out: list[str]  # names of the evaluation sets that are held-out training rows
    broken: int = 0  # rows that were skipped


def load(config: DataConfig, *, tasks: Tasks = (), replies: bool = False) -> DataRows:
    """Read or generate all rows.

    Args:
        tasks: What the environment lists, with `data.from_environment`.
        replies: Whether rows have a reply to imitate.

    Raises:
        ConfigError: Rows cannot be read, or there are none.
    """
    sets = evaluation_sets(config)
    held_out_sets = [name for name, evaluation in sets.items() if _is_held_out(config, evaluation)]
    broken = BrokenRows(config.max_broken_rows)

    train, held_out = _training(config, bool(held_out_sets), broken, tasks, replies=replies)
    warnings = _held_out_warnings(config, held_out_sets)

    evals = {}
    overlaps = []
    for name, evaluation in sets.items():
        rows = held_out if name in held_out_sets else _read_evaluation(config, name, evaluation, broken, replies)
        evals[name] = rows[: evaluation.rows]
        remedy = "; data.distinct=true keeps one of each" if name in held_out_sets and not config.distinct else ""
        overlaps += _overlap_warnings(train, name, evals[name], remedy)
    return DataRows(train, evals, [*broken.warnings, *warnings, *overlaps], held_out_sets, broken.count)


def evaluation_sets(config: DataConfig) -> dict[str, EvalSetConfig]:
    """Return the evaluation sets in force: `data.eval_path`, else `data.eval_sets`, else held-out rows."""
    if config.eval_path is not None:
        return {DEFAULT_EVAL_SET: EvalSetConfig(path=config.eval_path)}
    return config.eval_sets or {DEFAULT_EVAL_SET: EvalSetConfig()}


def is_local(config: DataConfig) -> bool:
    """Whether all rows can be loaded without network and without running a function of the user."""
    return not _made_by_code(config) and not any(map(sources.is_remote, paths(config).values()))


def paths(config: DataConfig) -> dict[str, Any]:
    """Return the files and hub data sets that the run reads, by setting."""
    found: dict[str, Any] = {f"data.train_sets.{name}.path": each.path for name, each in config.train_sets.items()}
    if _of_path(config):
        found["data.path"] = config.path
    for name, each in evaluation_sets(config).items():
        if each.path is not None:
            found["data.eval_path" if config.eval_path is not None else f"data.eval_sets.{name}.path"] = each.path
    return found


def describe_sources(config: DataConfig) -> str:
    """Say what is trained and evaluated on, of data whose rows only the run reads."""
    train = ", ".join(str(path) for key, path in paths(config).items() if not key.startswith("data.eval"))
    if config._target_ is not None:
        train = config._target_
    elif config.from_environment:
        train = "the tasks of the environment"

    evaluated = []
    for name, each in evaluation_sets(config).items():
        own = f"split {each.split} of {config.path}" if each.path is None else each.path
        evaluated.append(f"{name}: {'held-out rows' if _is_held_out(config, each) else own}")
    return f"training rows of {train}; evaluation set {', '.join(evaluated)}; rows are counted when the run starts"


def demonstrations(config: DataConfig) -> list[Row]:
    """Read the rows of `data.demonstrations`. Raises `ConfigError` as `load` does."""
    key = ("data.demonstrations", yaml_text(config.demonstrations))
    records = sources.read(config.demonstrations, subset=None, split="train", key="data.demonstrations")
    fields = _fields_of(config, "data", config, replies=True)
    return read_rows(records, fields, "demonstrations", key, config.distinct, BrokenRows(config.max_broken_rows))


def check_files(config: DataConfig, *, replies: bool = False) -> None:
    """Raise the `ConfigError` that `load` would raise for its sets that are files, where others are not."""
    broken = BrokenRows(config.max_broken_rows)
    training = [each.path for each in config.train_sets.values()] or [config.path]
    if not _made_by_code(config) and not any(path is not None and sources.is_remote(path) for path in training):
        _training(config, False, broken, replies=replies)
    for name, evaluation in evaluation_sets(config).items():
        if evaluation.path is not None and not sources.is_remote(evaluation.path):
            _read_evaluation(config, name, evaluation, broken, replies)


def _made_by_code(config: DataConfig) -> bool:
    """Whether code makes the training rows: a function of the user, or an environment."""
    return config._target_ is not None or config.from_environment


def _is_held_out(config: DataConfig, evaluation: EvalSetConfig) -> bool:
    """Whether an evaluation set consists of held-out training rows because there is no other split to read."""
    if evaluation.path is not None:
        return False
    return not config.eval_sets or not _of_path(config) or not sources.has_splits(config.path)


def _of_path(config: DataConfig) -> bool:
    """Whether the training rows are those of `data.path`."""
    return config.path is not None and config._target_ is None and not config.train_sets


def _training(
    config: DataConfig, with_held_out: bool, broken: BrokenRows, tasks: Tasks = (), *, replies: bool = False
) -> tuple[list[Row], list[Row]]:
    """Return the rows of all training sets, and those held out of each."""
    if config.path is None and not config.train_sets and not _made_by_code(config):
        generated, evaluated = _generated(config)
        if not replies:
            return generated, evaluated
        return [_with_reply(row) for row in generated], [_with_reply(row) for row in evaluated]

    train: list[Row] = []
    held_out: list[Row] = []
    for setting, rows in _read_training(config, broken, tasks, replies).items():
        if with_held_out and len(rows) < MIN_ROWS:
            raise _too_few(setting, len(rows), of_environment=config.from_environment)
        kept, held = _hold_out(rows, config.eval_fraction) if with_held_out else (rows, [])
        train += kept
        held_out += held
    return train, held_out


def _with_reply(row: Row) -> Row:
    return replace(row, reply={"role": REPLY, "content": row.answer})


def _generated(config: DataConfig) -> tuple[list[Row], list[Row]]:
    match config.generator:
        case Generator.arithmetic:
            return generators.arithmetic(config.arithmetic)
        case Generator.products:
            return generators.products(config.products)
        case Generator.chain:
            return generators.chain(config.chain)


def _read_training(config: DataConfig, broken: BrokenRows, tasks: Tasks, replies: bool) -> dict[Setting, list[Row]]:
    """Return the rows of each training set, by the setting that errors about all of them name."""
    if config.train_sets:
        return {
            (f"data.train_sets.{name}.path", yaml_text(each.path)): _read_set(config, name, each, broken, replies)
            for name, each in config.train_sets.items()
        }

    records: Records
    if config.from_environment:
        setting = ("data.from_environment", "true")
        numbered = enumerate(tasks, start=1)
        records = (Record("the tasks of the environment", number, dict(task)) for number, task in numbered)
    elif config._target_ is not None:
        setting = (user_rows.KEY, config._target_)
        records = user_rows.read(config._target_, config.args)
    else:
        setting = ("data.path", yaml_text(config.path))
        records = sources.read(config.path, subset=config.subset, split=config.split, key="data.path")

    fields = _fields_of(config, "data", config, replies and not config.from_environment)
    fields = replace(fields, may_be_blank=config.from_environment)
    return {setting: read_rows(records, fields, config.name, setting, config.distinct, broken)}


def _read_set(config: DataConfig, name: str, training: TrainSetConfig, broken: BrokenRows, replies: bool) -> list[Row]:
    key = f"data.train_sets.{name}"
    records = sources.read(training.path, subset=training.subset, split=training.split, key=f"{key}.path")
    fields = _fields_of(config, key, training, replies)
    return read_rows(records, fields, name, (f"{key}.path", training.path), config.distinct, broken)


def _read_evaluation(
    config: DataConfig, name: str, evaluation: EvalSetConfig, broken: BrokenRows, replies: bool
) -> list[Row]:
    key = "data" if config.eval_path is not None else f"data.eval_sets.{name}"
    path_key = "data.eval_path" if config.eval_path is not None else f"{key}.path"

    path = evaluation.path or config.path
    subset = evaluation.subset if evaluation.path else evaluation.subset or config.subset
    records: Records = sources.read(path, subset=subset, split=evaluation.split, key=path_key)
    fields = _fields_of(config, key, evaluation, replies)
    return read_rows(records, fields, name, (path_key, path), config.distinct, broken)


def _fields_of(
    config: DataConfig, key: str, own: DataConfig | TrainSetConfig | EvalSetConfig, replies: bool
) -> FieldMap:
    """Return the fields of a set: its own, else those of `data`."""
    return FieldMap(
        key=key,
        question=own.question or config.question,
        answer=own.answer or config.answer,
        answer_after=config.answer_after if own.answer_after is None else own.answer_after,
        context=config.context,
        replies=replies,
        tools=config.tools,
    )


def _held_out_warnings(config: DataConfig, names: Sequence[str]) -> list[str]:
    if not names or not config.eval_sets or not _of_path(config):
        return []
    sets = ", ".join(f"data.eval_sets.{name}" for name in names)
    return [f"data.path={config.path} has no other splits: holding out {config.eval_fraction:g} of its rows for {sets}"]


def _too_few(setting: Setting, rows: int, *, of_environment: bool) -> ConfigError:
    """Return the error of a training set that is too small to hold rows out of it."""
    accepted = f"at least {MIN_ROWS} rows, or rows to evaluate on in data.eval_path"
    if of_environment:
        accepted = f"an environment with at least {MIN_ROWS} tasks"
    return ConfigError(*setting, accepted, f"some are held out for evaluation, and it has {rows}")


def _hold_out(rows: list[Row], fraction: float) -> tuple[list[Row], list[Row]]:
    count = min(max(1, round(len(rows) * fraction)), len(rows) - 1)
    held_out = set(random.Random(HELD_OUT_SEED).sample(range(len(rows)), count))
    train = [row for index, row in enumerate(rows) if index not in held_out]
    return train, [rows[index] for index in sorted(held_out)]


def _overlap_warnings(train: Sequence[Row], name: str, evaluation: Sequence[Row], remedy: str) -> list[str]:
    asked = {row.asked for row in train}
    shared = sum(row.asked in asked for row in evaluation)
    if not shared:
        return []
    return [
        f"{shared} of the {len(evaluation)} questions of evaluation set {name} are in the training set: its accuracy "
        f"measures memorization{remedy}"
    ]
