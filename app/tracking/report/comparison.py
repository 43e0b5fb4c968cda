"""What a set of runs varies, and the mean and standard deviation of its results over seeds.

Runs that differ in nothing but `seed` are one setting. Its results cover the finished runs. The tables are for the
screen, the report and CSV files: a row for each run, and for each setting.
"""

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from app.errors import yaml_text
from app.tracking.number_format import MISSING, aligned, duration, measured, percent, plural
from app.tracking.report.data import RunData
from app.tracking.run_folder.summary import Status

SEED = "seed"
BEST = "eval/accuracy_best"
# The settings that a choice of a group (`algorithm=dapo`) shows in.
CHOICES = {
    "model": "model.name",
    "data": "data.name",
    "algorithm": "algorithm.name",
    "placement": "placement.kind",
    "device": "device.kind",
}
# Where a run's records go, and where its servers listen, changes no result.
NOT_COMPARED = r"tracking\..*|rollout\.(port|urls)|cluster\.address"
MAX_NAMED = 2  # settings beside the seed, by which runs are named; beyond it by their folders
MAX_COLUMNS = 6  # settings in the tables for people; beyond it they are in the CSV file and below the charts alone
# Settings that choose the evaluation's rows: those of sets of their own, or else those of the training rows.
EVALUATION = re.compile(r"data\.(eval_path|eval_sets\..*)")
ROWS = re.compile(r"data\.(name|path|subset|split|_target_|eval_fraction|(args|train_sets|arithmetic|products)\..*)")
OTHER_ROWS = "The runs were evaluated on different rows: their accuracies and their order say little."
SEED_TITLE = "mean ± standard deviation over the seeds of finished runs"
# Of `summary.json`, with a title and a format.
RESULTS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("eval/accuracy_first", "first accuracy", percent),
    ("eval/accuracy_last", "last", percent),
    ("eval/accuracy_best", "best", percent),
    ("total/seconds", "time", duration),
)
NAMES = [name for name, _, _ in RESULTS]
TITLES = [title for _, title, _ in RESULTS]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Several runs, the best first, and the settings that tell them apart."""

    runs: Sequence[RunData]
    keys: list[str]  # the settings that vary, the seed last
    names: list[str]  # of each run, made from its values

    @property
    def settings(self) -> list[str]:
        return [key for key in self.keys if key != SEED]

    @property
    def labels(self) -> list[str]:
        return [label(key, self.keys) for key in self.keys]

    @property
    def notes(self) -> list[str]:
        """Return what weakens the comparison, in sentences."""
        rows = set()  # of each evaluation, as text
        for run in (run for run in self.runs if BEST in run.summary):
            settings = {key: value for key, value in run.config.items() if value is not None}
            chosen = {key: value for key, value in settings.items() if EVALUATION.fullmatch(key)}
            if not any(key.endswith("path") for key in chosen):
                chosen |= {key: value for key, value in run.config.items() if ROWS.fullmatch(key)}
            rows.add(yaml_text([run.summary.get("eval/prompts"), chosen]))

        notes = [OTHER_ROWS] if len(rows) > 1 else []
        error = max((error for run in self.runs for error in run.values("eval/accuracy_stderr")), default=0.0)
        if error > 0.05:  # that of one half among 100 prompts
            notes.append(
                f"The accuracies have standard errors of up to {100 * error:.1f} points: more prompts tell more."
            )
        if resumed := sum(run.summary.get("attempts", 1) > 1 for run in self.runs):
            notes.append(f"The time of {plural(resumed, 'run')} is that of several attempts.")
        return notes

    def seed_groups(self) -> dict[tuple[str, ...], list[RunData]]:
        """Return the finished runs by their values of `settings`, the best mean first; empty without a second seed."""
        groups: dict[tuple[str, ...], list[RunData]] = {}
        for run in self.runs:
            if run.summary.get("status") == Status.finished.value:
                groups.setdefault(values_of(run, self.settings), []).append(run)

        if SEED not in self.keys or all(len(runs) < 2 for runs in groups.values()):
            return {}
        return dict(sorted(groups.items(), key=lambda group: -(spread(group[1], BEST)[0] or 0.0)))


def spread(runs: Sequence[RunData], total: str) -> tuple[float | None, float | None]:
    """Return mean and sample standard deviation of a number of `summary.json`, as far as there are values."""
    values = [float(run.summary[total]) for run in runs if total in run.summary]
    return (fmean(values) if values else None, stdev(values) if len(values) > 1 else None)


def compare(runs: Sequence[RunData]) -> Comparison:
    """Rank the runs by their best evaluation, find what varies between them, and name them by it."""
    ranked = sorted(runs, key=lambda run: -run.summary.get(BEST, -1.0))
    keys = distinguishing(ranked)
    return Comparison(ranked, keys, _names(ranked, keys))


def distinguishing(runs: Sequence[RunData]) -> list[str]:
    """Return the settings to tell the runs apart by, the seed last.

    These are the settings that vary and were given on a command line, and the seed. Of the others, which presets bring
    along, a setting is added only if it separates runs that those before it do not.
    """
    configured = [run for run in runs if run.config]
    # `resume` names the model that an evaluation evaluates, and of a training run only how it was started.
    skipped = re.compile(f"{NOT_COMPARED}|resume" if not all(run.is_evaluation for run in runs) else NOT_COMPARED)
    names = sorted({key for run in configured for key in run.config if not skipped.fullmatch(key)})
    varying = [key for key in names if len({values_of(run, [key]) for run in configured}) > 1]
    given = {override.lstrip("+~").split("=", 1)[0] for run in configured for override in run.overrides}
    given = {CHOICES.get(key, key) for key in given}  # a group's choice shows in a setting

    choices = list(CHOICES.values())
    rank = {key: index for index, key in enumerate(choices)}
    order = sorted(varying, key=lambda key: (key == SEED, key not in given, rank.get(key, len(choices)), key))

    chosen: list[str] = []
    parts = 1
    for key in order:
        finer = len({values_of(run, [*chosen, key]) for run in configured})
        if key in given or key == SEED or finer > parts:
            chosen.append(key)
            parts = finer
    return chosen


def values_of(run: RunData, keys: Sequence[str]) -> tuple[str, ...]:
    """Return a run's values of the keys as text."""
    return tuple(yaml_text(run.config.get(key, MISSING)) for key in keys)


def label(key: str, keys: Sequence[str]) -> str:
    """Return the short name of a key: its last word, or the whole key if another of `keys` ends alike.

    >>> label("trainer.lr", ["trainer.lr", "seed"]), label("algorithm.name", ["algorithm.name"])
    ('lr', 'algorithm')
    """
    if key in CHOICES.values():
        return key.split(".")[0]
    last = key.rpartition(".")[2]
    return last if sum(other.rpartition(".")[2] == last for other in keys) == 1 else key


def _names(runs: Sequence[RunData], keys: Sequence[str]) -> list[str]:
    """Name the runs by their values, as `dapo, lr=0.001, seed=1`; by their folders where those are equal or unknown."""
    names = []
    for run in runs:
        parts = [
            value if key in CHOICES.values() else f"{label(key, keys)}={value}"
            for key, value in zip(keys, values_of(run, keys), strict=True)
        ]
        few = len(keys) <= MAX_NAMED + (SEED in keys)
        names.append(", ".join(parts) if run.config and few else "")

    return [
        name if name and names.count(name) == 1 else f"{name} ({folder})" if name else folder
        for name, folder in zip(names, folder_names(runs), strict=True)
    ]


def folder_names(runs: Sequence[RunData]) -> list[str]:
    """Return unique short names: the folder names, with as many parent folders as needed."""
    for length in range(1, 6):
        names = ["/".join(run.folder.absolute().parts[-length:]) for run in runs]
        if len(set(names)) == len(names):
            break
    return names


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text for people, and of numbers for a CSV file. The first row is the head."""

    text: list[list[str]]
    numbers: list[list[object]]

    @property
    def csv(self) -> str:
        file = io.StringIO()
        csv.writer(file, lineterminator="\n").writerows(self.numbers)
        return file.getvalue()


def run_table(comparison: Comparison) -> Table:
    """Return a row for each run."""
    shown = len(comparison.keys) <= MAX_COLUMNS
    text = [["run", *(comparison.labels if shown else ()), "status", "last step", *TITLES]]
    numbers: list[list[object]] = [["folder", *comparison.keys, "status", "last_step", *NAMES]]
    for run, name in zip(comparison.runs, short_names(comparison.runs), strict=True):
        values = values_of(run, comparison.keys) if run.config else [""] * len(comparison.keys)
        status, steps = str(run.summary.get("status", "not started")), run.summary.get("steps", "")
        results = [measured(run.summary.get(key), form) for key, _, form in RESULTS]
        text.append([name, *(values if shown else ()), status, str(steps), *results])
        numbers.append([run.folder, *values, status, steps, *(run.summary.get(key, "") for key in NAMES)])
    return Table(text, numbers)


def seed_table(comparison: Comparison) -> Table | None:
    """Return a row for each setting; None unless a setting ran with several seeds."""
    groups = comparison.seed_groups()
    if not groups:
        return None

    settings = comparison.labels[: len(comparison.settings)]
    text = [[*settings, "runs", *TITLES]]
    numbers: list[list[object]] = [
        [*comparison.settings, "runs", *(f"{name}/{part}" for name in NAMES for part in ("mean", "std"))]
    ]
    for values, runs in groups.items():
        spreads = [spread(runs, name) for name in NAMES]
        results = [
            measured(mean, form) if deviation is None else f"{measured(mean, form)} ± {form(deviation)}"
            for (mean, deviation), (_, _, form) in zip(spreads, RESULTS, strict=True)
        ]
        text.append([*values, str(len(runs)), *results])
        numbers.append([*values, len(runs), *(number for pair in spreads for number in pair)])
    return Table(text, numbers)


def screen(comparison: Comparison) -> list[str]:
    """Return the tables as lines, and the errors of failed runs."""
    lines = aligned(run_table(comparison).text)
    if seeds := seed_table(comparison):
        lines += ["", SEED_TITLE, *aligned(seeds.text)]

    named = zip(short_names(comparison.runs), comparison.runs, strict=True)
    failed = [f"{name}: {run.summary['error']}" for name, run in named if "error" in run.summary]
    return [*lines, *comparison.notes, *(line.splitlines()[0] for line in failed)]


def short_names(runs: Sequence[RunData]) -> list[str]:
    """Return the job numbers, which the folders of a sweep begin with; the folders' names if there are none."""
    numbers = [match.group() for run in runs if (match := re.match(r"\d+(?=-\D|$)", run.folder.name))]
    unique = len(numbers) == len(runs) == len(set(numbers))
    return numbers if unique else folder_names(runs)
