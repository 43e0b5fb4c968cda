"""The numbers of rows that a run trains and evaluates on, for the screen, the plan, doctor and the report."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from app.config.data import DataConfig
from app.data import rows
from app.data.fields import Row
from app.data.rows import DataRows
from app.types import Prompt


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Rows by set, after everything that was skipped, dropped or held out."""

    train: Mapping[str, int]  # by source
    evals: Mapping[str, int]  # by evaluation set
    held_out: Sequence[str]  # names of the evaluation sets that are held-out training rows
    broken: int  # skipped
    weights: Mapping[str, float]  # by training set; empty: there is one

    @property
    def total(self) -> int:
        return sum(self.train.values()) + sum(self.evals.values())

    @property
    def text(self) -> str:
        """One line.

        >>> RowCounts({"mine": 47}, {"eval": 3}, ["eval"], 0, {}).text
        '47 training rows, 3 held-out rows'
        """
        parts = [_rows(sum(self.train.values()), "training row") + self._mixed]
        parts += [self._evaluation(name, size) for name, size in self.evals.items()]
        if self.broken:
            parts.append(_rows(self.broken, "broken row") + " skipped")
        return ", ".join(parts)

    @property
    def facts(self) -> dict[str, int]:
        """Entries of `summary.json`."""
        return {
            "data/training_rows": sum(self.train.values()),
            "data/evaluation_rows": sum(self.evals.values()),
            "data/broken_rows": self.broken,
        }

    def repeated(self, prompts_per_step: int) -> list[str]:
        """Warnings about sets that have fewer rows than one step takes of them."""
        shares = self.weights or dict.fromkeys(self.train, 1.0)
        total = sum(shares.values())
        warnings = []
        for name, size in self.train.items():
            taken = math.floor(prompts_per_step * shares[name] / total)
            if taken <= size:
                continue

            exceeded = f"exceeds the {size}"
            if self.weights:
                exceeded = f"takes {taken} of data.train_sets.{name}, which has {size}"
            warnings.append(
                f"algorithm.prompts_per_step={prompts_per_step} {exceeded} training rows: each step repeats some"
            )
        return warnings

    @property
    def _mixed(self) -> str:
        if not self.weights:
            return ""
        sets = [f"{name} {self.train[name]:,} at weight {weight:g}" for name, weight in self.weights.items()]
        return f" ({'; '.join(sets)})"

    def _evaluation(self, name: str, size: int) -> str:
        if name not in self.held_out:
            return f"{_rows(size, 'row')} in evaluation set {name}"
        return _rows(size, "held-out row") + (f" in evaluation set {name}" if len(self.evals) > 1 else "")


def count(
    train: Sequence[Prompt | Row],
    evals: Mapping[str, Sequence[Prompt | Row]],
    loaded: DataRows,
    weights: Mapping[str, float],
) -> RowCounts:
    """Count the rows, or the prompts made of them, that were loaded."""
    return RowCounts(
        train=Counter(each.source for each in train),
        evals={name: len(each) for name, each in evals.items()},
        held_out=loaded.held_out,
        broken=loaded.broken,
        weights=weights,
    )


def describe_rows(config: DataConfig, loaded: DataRows | None, prompts_per_step: int, steps: int) -> list[str]:
    """Return the section of `mode=plan`: rows, and the epochs of so many steps. `loaded`: None where only a run can."""
    if loaded is None:
        return [f"Data: {rows.describe_sources(config)}"]

    counts = count(loaded.train, loaded.evals, loaded, weights_of(config))
    epochs = steps * prompts_per_step / sum(counts.train.values())
    described = "1 step is" if steps == 1 else f"{steps} steps are"
    warnings = [f"  {each}" for each in (*loaded.warnings, *counts.repeated(prompts_per_step))]
    return [f"Data: {counts.text}; {described} {epochs:.3g} epochs", *warnings]


def steps_of_epochs(epochs: float, rows: int, prompts_per_step: int) -> int:
    """Return the steps that train on every row `epochs` times; the last one takes the first rows of the next epoch.

    >>> steps_of_epochs(2, 40, 16), steps_of_epochs(0.1, 30, 3)
    (5, 1)
    """
    return math.ceil(round(epochs * rows / prompts_per_step, 6))


def weights_of(config: DataConfig) -> dict[str, float]:
    """Return the weight of each training set by its name; empty if there is one without a name."""
    return {name: each.weight for name, each in config.train_sets.items()}


def _rows(size: int, noun: str) -> str:
    return f"{size:,} {noun}{'' if size == 1 else 's'}"
