"""The charts of the report and their sections. Metrics without a chart of their own go to the last section."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from app.tracking.report.data import RunData
from app.types import SYNC_PHASES


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart: a curve for each metric, or stacked bars."""

    section: str  # learning, health, episodes, time, speed, sync, more
    title: str
    metrics: tuple[str, ...]
    labels: tuple[str, ...]
    form: str = "number"  # number, percent, seconds, count, bytes
    kind: str = "line"  # line, stack
    log: bool = False
    note: str = ""


CHARTS = (
    Chart("learning", "Reward", ("reward/mean",), ("mean",)),
    Chart("learning", "Accuracy", ("eval/accuracy", "reward/accuracy"), ("held-out", "training"), "percent"),
    Chart("learning", "Entropy", ("entropy",), ("entropy",), note="nats per token"),
    Chart("health", "Engine/trainer mismatch", ("mismatch/kl",), ("KL",), log=True),
    Chart("health", "KL", ("kl/old", "kl/reference"), ("to the old policy", "to the reference")),
    Chart(
        "health",
        "Zero-variance groups, truncated completions",
        ("reward/zero_std_fraction", "completion/truncated_fraction"),
        ("zero variance", "truncated"),
        "percent",
    ),
    Chart("health", "Staleness", ("staleness/max", "staleness/mean"), ("max", "mean"), note="weight syncs"),
    Chart("health", "Gradient norm", ("grad_norm",), ("grad norm",), note="before clipping"),
    Chart("health", "Policy loss", ("loss/policy",), ("policy",)),
    Chart("health", "Clipped ratios", ("clip/high_fraction", "clip/low_fraction"), ("high", "low"), "percent"),
    Chart("health", "Completion length", ("completion/length_mean", "completion/length_p95"), ("mean", "p95"), "count"),
    Chart("episodes", "Turns of an episode", ("environment/turns_mean", "environment/turns_max"), ("mean", "max")),
    Chart(
        "time",
        "Time of each step",
        ("time/generate", "time/train", "time/sync"),
        ("generate", "train", "sync"),
        "seconds",
        "stack",
    ),
    Chart("speed", "Generation", ("throughput/completion_tokens_per_second",), ("completion tokens/s",), "count"),
    Chart("speed", "Training", ("trainer/tokens_per_second",), ("tokens/s",), "count"),
    Chart(
        "sync",
        "Time of each weight sync",
        tuple(f"sync/{phase}_seconds" for phase in SYNC_PHASES),
        SYNC_PHASES,
        "seconds",
        "stack",
    ),
    Chart("sync", "Bytes sent by each weight sync", ("sync/bytes",), ("bytes",), "bytes"),
)
FAMILIES = (  # section, title, the metrics of one chart with their label, form
    ("learning", "At least one of k is correct", r"reward/(pass@.+)", "percent"),
    ("episodes", "Scores of the environment", "environment/score_(.+)", "number"),
    ("speed", "Memory (MiB, largest process of each role)", "memory/(.+)_mib", "count"),
)
NOT_SHOWN = r"time/step|sync/total_seconds|eval/(.+/)?prompts"  # sums of shown metrics, and constants


def charts(runs: Sequence[RunData]) -> list[Chart]:
    """Return charts that show every measured metric: those of `CHARTS` and `FAMILIES`, and one for each of the rest."""
    measured = sorted({name for run in runs for name in run.series if run.values(name)})
    shown = [chart for chart in CHARTS if any(name in measured for name in chart.metrics)]

    for section, title, pattern, form in FAMILIES:
        found = {name: match[1].replace("_", " ") for name in measured if (match := re.fullmatch(pattern, name))}
        if found:
            shown.append(Chart(section, title, tuple(found), tuple(found.values()), form))

    named = {name for chart in shown for name in chart.metrics}
    for name in measured:
        if name not in named and not re.fullmatch(NOT_SHOWN, name):
            section, _, last = name.rpartition("/")
            form = {"fraction": "percent", "seconds": "seconds"}.get(last.rpartition("_")[2], "number")
            shown.append(Chart("episodes" if section == "environment" else "more", name, (name,), (last,), form))
    return shown
