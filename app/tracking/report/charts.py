"""Which charts the report shows, and in which section. A metric that no chart names is in the last section."""

from collections.abc import Sequence
from dataclasses import dataclass

from app.tracking.report.data import RunData


@dataclass(frozen=True, slots=True)
class Chart:
    section: str  # learning, sanity, time, speed, sync, more
    title: str
    metrics: tuple[str, ...]
    labels: tuple[str, ...] = ()
    form: str = "number"  # number, percent, seconds, count, bytes
    kind: str = "line"  # line, stack
    log: bool = False
    note: str = ""

    @property
    def plain(self) -> dict[str, object]:
        labels = self.labels or tuple(name.split("/", 1)[-1].replace("_", " ") for name in self.metrics)
        return {
            "section": self.section,
            "title": self.title,
            "metrics": self.metrics,
            "labels": labels,
            "form": self.form,
            "kind": self.kind,
            "log": self.log,
            "note": self.note,
        }


CHARTS = (
    Chart("learning", "Reward", ("reward/mean",), ("mean of the step",)),
    Chart("learning", "Accuracy", ("eval/accuracy", "reward/accuracy"), ("held out", "training, sampled"), "percent"),
    Chart("learning", "Entropy", ("entropy",), note="nats per token"),
    Chart("sanity", "Mismatch of engine and trainer", ("mismatch/kl",), ("KL",), log=True),
    Chart("sanity", "KL", ("kl/old", "kl/reference"), ("to the old policy", "to the reference")),
    Chart(
        "sanity",
        "Groups without spread, cut completions",
        ("reward/zero_std_fraction", "completion/truncated_fraction"),
        ("no spread", "truncated"),
        "percent",
    ),
    Chart("sanity", "Staleness", ("staleness/max", "staleness/mean"), ("max", "mean"), note="pushes"),
    Chart("sanity", "Gradient norm", ("grad_norm",), note="before clipping"),
    Chart("sanity", "Policy loss", ("loss/policy",)),
    Chart("sanity", "Clipped ratios", ("clip/high_fraction", "clip/low_fraction"), ("high", "low"), "percent"),
    Chart("sanity", "Completion length", ("completion/length_mean", "completion/length_p95"), ("mean", "p95"), "count"),
    Chart(
        "time",
        "Seconds of each step",
        ("time/generate", "time/train", "time/sync"),
        ("generate", "train", "sync"),
        "seconds",
        "stack",
    ),
    Chart("speed", "Generation", ("throughput/completion_tokens_per_second",), ("completion tokens/s",), "count"),
    Chart("speed", "Machine's memory in use", ("memory/host_used_fraction",), ("fullest machine",), "percent"),
    Chart("speed", "Training", ("trainer/tokens_per_second",), ("tokens/s",), "count"),
)

PUSH_PHASES = ("pause", "begin", "gather", "load", "end", "resume")


def charts(runs: Sequence[RunData]) -> list[Chart]:
    """The charts for which a run has numbers: the ones above, what their prefix says, and all the rest."""
    measured = sorted({name for run in runs for name in run.series if run.values(name)})
    shown = [chart for chart in CHARTS if any(name in measured for name in chart.metrics)]
    memory = tuple(name for name in measured if name.startswith("memory/") and name.endswith("_mib"))
    phases = tuple(name for name in measured if name.startswith("sync/") and name.endswith("_seconds"))
    phases = tuple(sorted((name for name in phases if name != "sync/total_seconds"), key=_in_order))
    passes = tuple(name for name in measured if name.startswith("reward/pass@"))
    if passes:
        labels = tuple(name.removeprefix("reward/") for name in passes)
        shown.append(Chart("learning", "Right at least once in k", passes, labels, "percent"))
    if memory:
        labels = tuple(name.removeprefix("memory/").removesuffix("_mib").replace("_", " ") for name in memory)
        shown.append(Chart("speed", "Memory, MiB of the largest", memory, labels, form="count"))
    if phases:
        labels = tuple(name.removeprefix("sync/").removesuffix("_seconds") for name in phases)
        shown.append(Chart("sync", "Seconds of each push", phases, labels, "seconds", "stack"))
    if "sync/bytes" in measured:
        shown.append(Chart("sync", "Sent by each push", ("sync/bytes",), ("bytes",), "bytes"))
    named = {name for chart in shown for name in chart.metrics} | {"time/step", "sync/total_seconds"}
    rest = [name for name in measured if name not in named]
    return shown + [Chart("more", name, (name,), (name,)) for name in rest]


def _in_order(name: str) -> tuple[int, str]:
    """The phases of a push as they follow each other."""
    phase = name.removeprefix("sync/").removesuffix("_seconds")
    return (PUSH_PHASES.index(phase) if phase in PUSH_PHASES else len(PUSH_PHASES), name)
