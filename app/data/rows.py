"""Load all rows of a run, training sets and evaluation sets, before templating and tokenization.

    data.path, data.train_sets, data._target_ ──→ records ──→ rows ──→ distinct ──→ training rows
    the tasks of an environment ────────────────→ records ──→ rows ──→ distinct ──→ training rows
    generated problems ──────────────────────────────────────────────→ training rows + held-out rows

    evaluation ── data.eval_path, or data.eval_sets.<name>.path ───→ rows of its own
               ── data.path is a hub data set ─────────────────────→ its other splits
               ── else ────────────────────────────────────────────→ held-out training rows (eval_fraction)

`sets_of` names the sets without reading them, for the checks, `mode=plan` and `mode=doctor`; `load` reads them.

Invariants:
- A row keeps its index among all records of its set, whatever is skipped or dropped before it.
- Training rows and held-out rows are disjoint. Held-out and generated rows are the same for every run, machine and
  Python version, so that runs are comparable: `random.Random.sample` over a range is stable.
- An evaluation set that shares questions with the training set causes a warning; demonstrations of them are left out.
"""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from app.config.data import OPERANDS, DataConfig, EvalSetConfig, GeneratedConfig
from app.data import records, user_rows
from app.data.records import Record, Records
from app.data.row import Row, RowMapper
from app.errors import ConfigError, expect
from app.utils.chat_messages import REPLY

DEFAULT_EVAL_SET = "eval"
TASKS = "data.name"  # key of the set that consists of an environment's tasks
SEED = 0  # not that of the run
MIN_ROWS = 2  # of a training set out of which some are held
MEDIA = frozenset(("image", "images", "video", "videos", "audio", "audios"))  # columns of other trainers

Tasks = Sequence[Mapping[str, Any]]  # rows that an environment lists


@dataclass(frozen=True, slots=True)
class RowSet:
    """A set of rows, before it is read."""

    name: str
    key: str  # the setting that selects it, named in errors about all of its rows
    value: Any = None  # of that setting
    subset: str | None = None
    split: str = "train"
    limit: int | None = None  # the first rows only
    held_out: bool = False  # of the training sets
    question: str | None = None  # fields of its own
    answer: str | None = None

    @property
    def path(self) -> str | list[str] | None:
        """Files or a hub data set; None where code makes the rows, or other sets have them."""
        return None if self.held_out or self.key in (TASKS, user_rows.KEY) else self.value

    @property
    def is_local(self) -> bool:
        """Whether it can be read without network and without running a function of the user."""
        return self.held_out or (self.path is not None and not records.is_remote(self.path))


@dataclass(frozen=True, slots=True)
class RowSets:
    """All sets of a run."""

    train: Sequence[RowSet]  # empty: the problems are generated
    evals: Sequence[RowSet]

    @property
    def are_local(self) -> bool:
        return all(each.is_local for each in (*self.train, *self.evals))

    @property
    def text(self) -> str:
        """One line about sets that are not read yet."""
        train = ["the tasks of the environment" if each.key == TASKS else str(each.value) for each in self.train]
        evaluated = []
        for each in self.evals:
            rows = f"split {each.split} of {each.value}" if not each.is_local else each.value
            evaluated.append(f"{each.name}: {'held-out rows' if each.held_out else rows}")
        return f"training rows of {', '.join(train)}; evaluation set {', '.join(evaluated)}"


@dataclass(frozen=True, slots=True)
class DataRows:
    """All rows of a run. No list is empty."""

    train: list[Row]
    evals: dict[str, list[Row]]  # by evaluation set
    warnings: list[str]  # for the run to record
    held_out: list[str]  # names of the evaluation sets that are held-out training rows
    broken: int = 0  # rows that were skipped


def sets_of(config: DataConfig) -> RowSets:
    """Return the sets that the settings select."""
    train = []
    if config.train_sets:
        for name, each in config.train_sets.items():
            key = f"data.train_sets.{name}.path"
            subset = config.subset if config.path in (None, each.path) else None  # a preset's is of its own path
            own = RowSet(name, key, each.path, subset, config.split, question=each.question, answer=each.answer)
            train.append(own)
    elif config._target_ is not None:
        train = [RowSet(config.name, user_rows.KEY, config._target_)]
    elif config.path is not None:
        train = [RowSet(config.name, "data.path", config.path, config.subset, config.split)]
    elif config.from_environment:
        train = [RowSet(config.name, TASKS, config.name)]

    if config.eval_path is not None:
        return RowSets(train, [RowSet(DEFAULT_EVAL_SET, "data.eval_path", config.eval_path, split="test")])

    has_splits = bool(config.eval_sets) and _is_of_path(train) and records.has_splits(config.path)
    evals = []
    for name, evaluation in (config.eval_sets or {DEFAULT_EVAL_SET: EvalSetConfig()}).items():
        key, split, limit = f"data.eval_sets.{name}.path", evaluation.split, evaluation.rows
        if evaluation.path is not None:
            question, answer = evaluation.question, evaluation.answer
            evals.append(RowSet(name, key, evaluation.path, None, split, limit, question=question, answer=answer))
        elif has_splits:
            evals.append(RowSet(name, key, config.path, config.subset, split, limit))
        else:
            evals.append(RowSet(name, key, limit=limit, held_out=True))
    return RowSets(train, evals)


def load(config: DataConfig, *, tasks: Tasks = (), replies: bool = False) -> DataRows:
    """Read or generate all rows. Raises `ConfigError` if they cannot be read, or there are none."""
    sets = sets_of(config)
    held_out_sets = [each.name for each in sets.evals if each.held_out]
    reader = RowReader(config, replies=replies)
    train: list[Row] = []
    parts: list[list[Row]] = []  # held out of each training set
    if not sets.train:
        train, *parts = generated(config.name, config.generated, replies=replies)
    for each in sets.train:
        rows = reader.read(each, tasks)
        kept, held = _hold_out(rows, each, config.eval_fraction) if held_out_sets else (rows, [])
        train += kept
        parts.append(held)

    held_out = [row for each in zip_longest(*parts) for row in each if row]  # `rows` of an evaluation set are of all
    evals = {each.name: (held_out if each.held_out else reader.read(each))[: each.limit] for each in sets.evals}

    warnings = reader.warnings
    if held_out_sets and config.eval_sets and _is_of_path(sets.train):
        names = ", ".join(f"data.eval_sets.{name}" for name in held_out_sets)
        share = f"{config.eval_fraction:g} of its rows"
        warnings.append(f"data.path={config.path} has no other splits: holding out {share} for {names}")

    known = {row.prompt_key for row in train}
    for name, evaluation in evals.items():
        if shared := sum(row.prompt_key in known for row in evaluation):
            remedy = "; data.distinct=true keeps one of each" if name in held_out_sets and not config.distinct else ""
            questions = f"{shared} of the {len(evaluation)} questions of evaluation set {name}"
            warnings.append(f"{questions} are in the training set: its accuracy measures memorization{remedy}")
    return DataRows(train, evals, warnings, held_out_sets, reader.skipped)


def check_files(config: DataConfig, *, replies: bool = False) -> None:
    """Raise the `ConfigError` that `load` would raise for its sets that are files, where others are not."""
    reader = RowReader(config, replies=replies)
    sets = sets_of(config)
    for each in (*sets.train, *sets.evals):
        if each.is_local and not each.held_out:
            reader.read(each)


def demonstrations(config: DataConfig, evaluated: Iterable[Row]) -> tuple[list[Row], list[str]]:
    """Read the rows of `data.demonstrations`, without the questions of evaluated rows. Raises as `load` does.

    Returns the rows and warnings.
    """
    key = "data.demonstrations"
    reader = RowReader(config, replies=True)
    rows = reader.read(RowSet("demonstrations", key, config.demonstrations))
    asked = {row.prompt_key for row in evaluated}
    kept = [row for row in rows if row.prompt_key not in asked]
    expect(bool(kept), key, config.demonstrations, "rows with questions that no evaluation set has")
    left_out = f"{len(rows) - len(kept)} of {len(rows)} demonstrations are left out: evaluation sets ask the same"
    return kept, [*reader.warnings, *([left_out] if len(kept) < len(rows) else [])]


def generated(name: str, sizes: GeneratedConfig, *, replies: bool = False) -> tuple[list[Row], list[Row]]:
    """Draw different problems, some to train on and some held out. The tiny models learned their skill from them.

    | name       | row                 | difficulty                                           |
    |------------|---------------------|------------------------------------------------------|
    | arithmetic | "12+34=" → "46"     | within reach of the tiny model                       |
    | products   | "37*84=" → "3108"   | too hard for it without `environment=calculator`     |
    """
    operands = OPERANDS[name]
    drawn = random.Random(SEED).sample(range(len(operands) ** 2), sizes.problems + sizes.eval_problems)

    rows = []
    for index, number in enumerate(drawn):
        left, right = (operands[each] for each in divmod(number, len(operands)))
        question = f"{left}+{right}=" if name == "arithmetic" else f"{left}*{right}="
        answer = str(left + right if name == "arithmetic" else left * right)
        reply = {"role": REPLY, "content": answer} if replies else None
        rows.append(Row(question, answer, name, index, {"question": question, "answer": answer}, reply=reply))
    return rows[: sizes.problems], rows[sizes.problems :]


class RowReader:
    """Reads sets of rows. Over all of them it skips at most `data.max_broken_rows` broken rows."""

    def __init__(self, config: DataConfig, *, replies: bool) -> None:
        self.skipped = 0  # broken rows so far
        self._config = config
        self._replies = replies
        self._errors: dict[str, list[ConfigError]] = {}  # of the skipped rows, by file or data set
        self._unused: dict[str, set[str]] = {}  # columns that no prompt can have, by file or data set

    @property
    def warnings(self) -> list[str]:
        """One sentence for each file that had broken rows, or columns that no prompt can have."""
        warnings = []
        for where, errors in self._errors.items():
            warnings.append(f"skipped {len(errors)} broken row(s) of {where}; the first: {errors[0]}")
        for where, names in self._unused.items():
            warnings.append(f"columns of {where} are not used, since prompts are text: {', '.join(sorted(names))}")
        return warnings

    def read(self, row_set: RowSet, tasks: Tasks = ()) -> list[Row]:
        """Read the rows of one set. Raises `ConfigError` if too many are broken, or there are none."""
        skipped_before = self.skipped
        rows = list(self._rows(row_set, tasks))
        if not rows:
            skipped = self.skipped - skipped_before
            why = f"all {skipped} rows of this one are broken" if skipped else "this one is empty"
            raise ConfigError(row_set.key, row_set.value, "a data set with rows", why)
        return rows

    def _rows(self, row_set: RowSet, tasks: Tasks) -> Iterator[Row]:
        are_tasks = row_set.key == TASKS
        replies = self._replies and not are_tasks
        config = self._config
        config = replace(config, question=row_set.question or config.question, answer=row_set.answer or config.answer)
        mapper = RowMapper(config, row_set.name, replies=replies, may_be_blank=are_tasks)
        seen: set[tuple[str, str]] = set()
        for index, record in enumerate(self._records(row_set, tasks)):
            try:
                if isinstance(record.values, ConfigError):
                    raise record.values
                place = f"row {record.number} of {record.where}"
                row = mapper.row(record.values, index, place, padded=record.padded)
            except ConfigError as error:
                name = error.key.removeprefix("data.")
                if name in ("question", "answer") and getattr(row_set, name) is not None:  # a field of the set's own
                    setting = f"{row_set.key.removesuffix('path')}{name}"
                    error = ConfigError(setting, error.value, error.accepted, error.reason)
                self._skip(record.where, error)
                continue

            if unused := MEDIA.intersection(record.values) | {*record.left_out}:
                self._unused.setdefault(record.where, set()).update(unused)
            if self._config.distinct:
                key = (row.prompt_key, row.answer)
                if key in seen:
                    continue
                seen.add(key)
            yield row

    def _records(self, row_set: RowSet, tasks: Tasks) -> Records:
        if row_set.path is not None:
            return records.read(row_set.path, subset=row_set.subset, split=row_set.split, key=row_set.key)
        if row_set.key == user_rows.KEY:
            return user_rows.read(row_set.value, self._config.args)
        numbered = enumerate(tasks, start=1)
        return (Record("the tasks of the environment", number, dict(task)) for number, task in numbered)

    def _skip(self, where: str, error: ConfigError) -> None:
        """Count a broken row of a file. Raises its error if too many were skipped before."""
        limit = self._config.max_broken_rows
        if self.skipped < limit:
            self.skipped += 1
            self._errors.setdefault(where, []).append(error)
            return
        if not limit:
            raise error
        skipped = f"data.max_broken_rows={limit} broken rows were skipped before"
        raise ConfigError(error.key, error.value, error.accepted, skipped) from error


def _is_of_path(train: Sequence[RowSet]) -> bool:
    """Whether the training rows are those of `data.path`."""
    return [each.key for each in train] == ["data.path"]


def _hold_out(rows: list[Row], row_set: RowSet, fraction: float) -> tuple[list[Row], list[Row]]:
    """Split the rows of a training set. Raises `ConfigError` if there are too few."""
    if len(rows) < MIN_ROWS:
        accepted = f"at least {MIN_ROWS} rows, or rows to evaluate on in data.eval_path"
        if row_set.key == TASKS:
            accepted = f"an environment with at least {MIN_ROWS} tasks"
        why = f"some are held out for evaluation, and it has {len(rows)}"
        raise ConfigError(row_set.key, row_set.value, accepted, why)

    count = min(max(1, round(len(rows) * fraction)), len(rows) - 1)
    held_out = set(random.Random(SEED).sample(range(len(rows)), count))
    train = [row for index, row in enumerate(rows) if index not in held_out]
    return train, [rows[index] for index in sorted(held_out)]
