"""Load all rows of a run, training set and evaluation sets, before templating and tokenization.

    data.path ── null ─────────→ generated arithmetic ──→ training rows + held-out rows
              ── a local file ─→ field map ─→ distinct ─→ training rows + held-out rows (eval_fraction)
              ── a hub id ─────→ field map ─→ distinct ─→ training rows; evaluation sets are its other splits

Invariants:
- Training rows and held-out rows are disjoint.
- The held-out rows of a file are the same for every seed, so that runs are comparable.
- An evaluation set that shares questions with the training set causes a warning.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass

from app.config.data import DataConfig, EvalSetConfig
from app.data import arithmetic, sources
from app.data.fields import FieldMap, Row
from app.errors import ConfigError

DEFAULT_EVAL_SET = "eval"
# Independent of the run's seed: runs with different seeds are evaluated on the same rows.
HELD_OUT_SEED = 0


@dataclass(frozen=True, slots=True)
class DataRows:
    """All rows of a run. No list is empty."""

    train: list[Row]
    evals: dict[str, list[Row]]  # by evaluation set
    warnings: list[str]  # for the run to record


def load(config: DataConfig, *, seed: int) -> DataRows:
    """Read or generate all rows. `seed` only affects generated problems. Raises `ConfigError`."""
    sets = config.eval_sets or {DEFAULT_EVAL_SET: EvalSetConfig()}
    held_out_sets = [name for name, evaluation in sets.items() if _is_held_out(config, evaluation)]

    held_out: list[Row] = []
    warnings: list[str] = []
    if config.path is None:
        train, held_out = arithmetic.problems(config.arithmetic, seed)
    else:
        train = _read_training(config)
        if held_out_sets:
            warnings += _held_out_warnings(config, held_out_sets)
            train, held_out = _hold_out(train, config)

    evals = {}
    for name, evaluation in sets.items():
        rows = held_out if name in held_out_sets else _read_evaluation(config, name, evaluation)
        evals[name] = rows[: evaluation.rows]
        warnings += _overlap_warnings(train, name, evals[name])
    return DataRows(train, evals, warnings)


def _is_held_out(config: DataConfig, evaluation: EvalSetConfig) -> bool:
    """Whether an evaluation set consists of held-out training rows because there is no other split to read."""
    if evaluation.path is not None:
        return False
    return config.path is None or not config.eval_sets or sources.local_file(config.path) is not None


def _held_out_warnings(config: DataConfig, names: list[str]) -> list[str]:
    if not config.eval_sets:
        return []
    sets = ", ".join(f"data.eval_sets.{name}" for name in names)
    return [
        f"data.path={config.path} is a file without splits: holding out {config.eval_fraction:g} of its rows for {sets}"
    ]


def _hold_out(rows: list[Row], config: DataConfig) -> tuple[list[Row], list[Row]]:
    if len(rows) < 2:
        raise ConfigError(
            f"data.path={config.path} is not accepted: give at least 2 rows, since some are held out for evaluation "
            f"(it has {len(rows)}), or separate evaluation sets in data.eval_sets."
        )

    count = min(max(1, round(len(rows) * config.eval_fraction)), len(rows) - 1)
    held_out = set(random.Random(HELD_OUT_SEED).sample(range(len(rows)), count))
    train = [row for index, row in enumerate(rows) if index not in held_out]
    return train, [rows[index] for index in sorted(held_out)]


def _read_training(config: DataConfig) -> list[Row]:
    assert config.path is not None
    fields = FieldMap("data", config.path, config.question, config.answer, config.answer_after)
    return _read(config.path, config.subset, config.split, fields, config.name, config.distinct)


def _read_evaluation(config: DataConfig, name: str, evaluation: EvalSetConfig) -> list[Row]:
    path = evaluation.path or config.path
    assert path is not None
    subset = evaluation.subset if evaluation.path else evaluation.subset or config.subset
    fields = FieldMap(
        key=f"data.eval_sets.{name}",
        where=path,
        question=evaluation.question or config.question,
        answer=evaluation.answer or config.answer,
        answer_after=config.answer_after if evaluation.answer_after is None else evaluation.answer_after,
    )
    return _read(path, subset, evaluation.split, fields, name, config.distinct)


def _read(path: str, subset: str | None, split: str, fields: FieldMap, source: str, distinct: bool) -> list[Row]:
    records = sources.read(path, subset=subset, split=split, key=fields.key)
    mapped = (
        fields.row(record, source=source, index=index, number=number) for index, (number, record) in enumerate(records)
    )
    rows = list(_distinct(mapped) if distinct else mapped)
    if not rows:
        raise ConfigError(f"{fields.key}.path={path} is not accepted: give a data set with rows; this one is empty.")
    return rows


def _distinct(rows: Iterable[Row]) -> Iterable[Row]:
    seen: set[tuple[str, str]] = set()
    for row in rows:
        if (row.question, row.answer) not in seen:
            seen.add((row.question, row.answer))
            yield row


def _overlap_warnings(train: list[Row], name: str, evaluation: list[Row]) -> list[str]:
    questions = {row.question for row in train}
    shared = sum(row.question in questions for row in evaluation)
    if not shared:
        return []
    return [
        f"{shared} of the {len(evaluation)} questions of evaluation set {name} are in the training set: its accuracy "
        "measures memorization"
    ]
