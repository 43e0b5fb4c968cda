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
    form: str  # number, percent, seconds, count, bytes
    kind: str  # line, stack
    log: bool


CHARTS: tuple[tuple[str, str, dict[str, str]], ...] = (  # section, title, metric → label
    ("learning", "Reward", {"reward/mean": "mean"}),
    ("learning", "Accuracy", {"eval/accuracy": "held-out", "reward/accuracy": "training"}),
    ("learning", "Entropy (nats per token)", {"entropy": "entropy"}),
    ("health", "Engine/trainer mismatch", {"mismatch/kl": "KL"}),
    ("health", "KL", {"kl/old": "to the old policy", "kl/reference": "to the reference"}),
    (
        "health",
        "Zero-variance groups, truncated completions",
        {"reward/zero_std_fraction": "zero variance", "completion/truncated_fraction": "truncated"},
    ),
    ("health", "Staleness (weight syncs)", {"staleness/max": "max", "staleness/mean": "mean"}),
    ("health", "Gradient norm (before clipping)", {"grad_norm": "grad norm"}),
    ("health", "Policy loss", {"loss/policy": "policy"}),
    ("health", "Clipped ratios", {"clip/high_fraction": "high", "clip/low_fraction": "low"}),
    ("health", "Completion length", {"completion/length_mean": "mean", "completion/length_p95": "p95"}),
    ("episodes", "Turns of an episode", {"environment/turns_mean": "mean", "environment/turns_max": "max"}),
    ("time", "Time of each step", {f"time/{phase}": phase for phase in ("generate", "train", "sync")}),
    ("speed", "Generation", {"throughput/completion_tokens_per_second": "completion tokens/s"}),
    ("speed", "Accept length (tokens of a verified draft)", {"rollout/accept_length": "tokens"}),
    ("speed", "Training", {"trainer/tokens_per_second": "tokens/s"}),
    ("sync", "Time of each weight sync", {f"sync/{phase}_seconds": phase for phase in SYNC_PHASES}),
    ("sync", "Bytes sent by each weight sync", {"sync/bytes": "bytes"}),
)
FAMILIES = (  # section, title, the metrics of one chart with their label
    ("learning", "At least one of k is correct", r"reward/(pass@.+)"),
    ("episodes", "Scores of the environment", "environment/score_(.+)"),
    ("speed", "Memory (MiB, largest process of each role)", "memory/(.+)_mib"),
)
FORMS = (  # form, its metrics
    ("percent", r".*(_fraction|/accuracy)|reward/pass@.*"),
    ("count", r".*_mib|.*tokens_per_second|completion/length_.*"),
    ("seconds", r"time/.*|.*[_/]seconds"),
    ("bytes", r".*bytes"),
    ("number", r".*"),
)
STACKED = r"time/(generate|train|sync)|sync/.*_seconds"
LOGARITHMIC = ("mismatch/kl",)
NOT_SHOWN = r"time/step|sync/total_seconds|eval/(.+/)?prompts"  # sums of shown metrics, and constants


def charts(runs: Sequence[RunData]) -> list[Chart]:
    """Return charts that show every measured metric: those of `CHARTS` and `FAMILIES`, and one for each of the rest."""
    rows = [row for run in runs for row in run.rows]
    measured = sorted({name for row in rows for name, value in row.items() if value is not None} - {"step"})
    found = [chart for chart in CHARTS if not chart[2].keys().isdisjoint(measured)]
    for section, title, pattern in FAMILIES:
        matches = (re.fullmatch(pattern, name) for name in measured)
        found.append((section, title, {match[0]: match[1].replace("_", " ") for match in matches if match}))

    charted = {name for _, _, labels in found for name in labels}
    for name in measured:
        if name not in charted and not re.fullmatch(NOT_SHOWN, name):
            found.append(("episodes" if name.startswith("environment/") else "more", name, {name: name}))

    shown = []
    for section, title, labels in (each for each in found if each[2]):
        first, *others = labels
        form = next(form for form, pattern in FORMS if re.fullmatch(pattern, first))
        kind = "stack" if others and re.fullmatch(STACKED, first) else "line"
        shown.append(Chart(section, title, tuple(labels), tuple(labels.values()), form, kind, first in LOGARITHMIC))
    return shown
