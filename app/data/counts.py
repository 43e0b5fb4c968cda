"""The numbers of rows that a run trains and evaluates on, for the screen, the plan, doctor and the report."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from app.config.data import DataConfig
from app.data.row import Row
from app.data.rows import DataRows, sets_of
from app.types import Prompt


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Rows by set, after everything that was skipped, dropped or held out."""

    train: Mapping[str, int]  # by source
    evals: Mapping[str, int]  # by evaluation set
    held_out: Sequence[str]  # names of the evaluation sets that are held-out training rows
    broken: int  # skipped
    weights: Mapping[str, float]  # by training set; empty: there is one

    @classmethod
    def of(
        cls,
        train: Sequence[Row] | Sequence[Prompt],
        evals: Mapping[str, Sequence[Row] | Sequence[Prompt]],
        loaded: DataRows,
        weights: Mapping[str, float],
    ) -> "RowCounts":
        """Count the rows, or the prompts made of them, that were loaded."""
        by_set = {name: len(each) for name, each in evals.items()}
        return cls(Counter(each.source for each in train), by_set, loaded.held_out, loaded.broken, weights)

    @property
    def text(self) -> str:
        """One line.

        >>> RowCounts({"mine": 47}, {"eval": 3}, ["eval"], 0, {}).text
        '47 training rows, 3 held-out rows'
        """
        mixed = "; ".join(f"{name} {self.train[name]:,} at weight {weight:g}" for name, weight in self.weights.items())
        parts = [_rows(sum(self.train.values()), "training row") + (mixed and f" ({mixed})")]
        for name, size in self.evals.items():
            is_held_out = name in self.held_out
            named = f" in evaluation set {name}" if len(self.evals) > 1 or not is_held_out else ""
            parts.append(_rows(size, "held-out row" if is_held_out else "row") + named)
        if self.broken:
            parts.append(_rows(self.broken, "broken row") + " skipped")
        return ", ".join(parts)

    @property
    def epoch(self) -> float:
        """Prompts until every row was drawn, by the weights of the sets.

        >>> RowCounts({"few": 100, "many": 900}, {}, [], 0, {"few": 1, "many": 1}).epoch
        1800.0
        """
        total = sum(self.weights.values())
        by_set = (self.train[name] * total / weight for name, weight in self.weights.items())
        return max(by_set, default=sum(self.train.values()))

    @property
    def facts(self) -> dict[str, int]:
        """Entries of `summary.json`."""
        return {
            "data/training_rows": sum(self.train.values()),
            "data/evaluation_rows": sum(self.evals.values()),
            "data/broken_rows": self.broken,
        }


def describe_rows(config: DataConfig, loaded: DataRows | None, prompts_per_step: int, steps: int) -> list[str]:
    """Return the section of `mode=plan`: rows, and the epochs of so many steps. `loaded`: None where only a run can."""
    if loaded is None:
        return [f"Data: {sets_of(config).text}; rows are counted when the run starts"]

    counts = RowCounts.of(loaded.train, loaded.evals, loaded, config.weights)
    epochs = steps * prompts_per_step / counts.epoch
    described = "1 step is" if steps == 1 else f"{steps} steps are"
    return [f"Data: {counts.text}; {described} {epochs:.3g} epochs", *(f"  {each}" for each in loaded.warnings)]


def steps_of_epochs(epochs: float, rows: float, prompts_per_step: int) -> int:
    """Return the steps that train on every row `epochs` times; the last one takes the first rows of the next epoch.

    >>> steps_of_epochs(2, 40, 16), steps_of_epochs(0.1, 30, 3)
    (5, 1)
    """
    return math.ceil(round(epochs * rows / prompts_per_step, 6))


def _rows(size: int, noun: str) -> str:
    return f"{size:,} {noun}{'' if size == 1 else 's'}"
