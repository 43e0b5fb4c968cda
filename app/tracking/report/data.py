"""A run folder as the report needs it: numbers, configuration, samples and warnings, read back from its files.

Always: it works on whatever a run left (running, killed, without some of the files) and its size is bounded however
long the run was: at most `POINTS` points a curve and `SAMPLED_STEPS` steps of samples, both evenly over the run.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from app.config import RunConfig
from app.tracking.run_folder import metrics_file as jsonl
from app.tracking.run_folder import samples, summary

POINTS = 600
SAMPLED_STEPS = 40
TEXT_LIMIT = 6000  # characters of one question or completion
WARNINGS = "logs/warnings.jsonl"
MISSING = "—"


@dataclass(frozen=True, slots=True)
class RunData:
    """One run. `series` has a value or None for each of `steps`."""

    folder: Path
    name: str
    label: str  # model · algorithm · placement · device
    summary: Mapping[str, Any]
    steps: list[int]
    series: Mapping[str, list[float | None]]
    config: Mapping[str, Any]  # key → value, nested keys joined by dots; empty if the run left none
    overrides: list[str]  # what was given on the command line
    warnings: list[Mapping[str, Any]]  # time, step, text
    samples: list[Mapping[str, Any]]  # step, rows

    def values(self, name: str) -> list[float]:
        """The measured values of a metric, in the order of the steps."""
        return [value for value in self.series.get(name, ()) if value is not None]

    @property
    def changed(self) -> dict[str, tuple[Any, Any]]:
        """Key → (default, value) of what differs from the schema's defaults."""
        defaults = flatten(to_plain(OmegaConf.structured(RunConfig)))
        return {
            key: (defaults.get(key, MISSING), value)
            for key, value in self.config.items()
            if defaults.get(key, MISSING) != value and value not in ({}, [], None)
        }


def read_run(folder: Path) -> RunData:
    """Read a run folder; what is not there is empty."""
    rows = list(jsonl.read(folder / jsonl.NAME))
    steps, series = curves(rows)
    config, overrides = read_config(folder / "config")
    return RunData(
        folder=folder,
        name=folder.name,
        label=_label(config) or folder.name,
        summary=summary.read(folder),
        steps=steps,
        series=series,
        config=config,
        overrides=overrides,
        warnings=list(jsonl.read(folder / WARNINGS)),
        samples=read_samples(folder),
    )


def find_runs(folder: Path) -> list[Path]:
    """The run folders at or below `folder` (a sweep's, or all of `outputs`), in the order of their names."""
    if (folder / jsonl.NAME).exists():
        return [folder]
    return sorted(path.parent for path in folder.rglob(jsonl.NAME))


def curves(rows: list[dict]) -> tuple[list[int], dict[str, list[float | None]]]:
    """Steps and, for each metric, its values; longer runs are thinned to the means of up to `POINTS` neighbourhoods."""
    size = max(1, -(-len(rows) // POINTS))
    buckets = [rows[start : start + size] for start in range(0, len(rows), size)]
    names = sorted({name for row in rows for name in row} - {"step"})
    steps = [bucket[-1]["step"] for bucket in buckets]
    return steps, {name: [_mean(bucket, name) for bucket in buckets] for name in names}


def read_config(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The composed configuration, flat, and the command line, as Hydra wrote them."""
    composed, typed = folder / "config.yaml", folder / "overrides.yaml"
    config = flatten(to_plain(OmegaConf.load(composed))) if composed.exists() else {}
    overrides = [str(item) for item in OmegaConf.load(typed)] if typed.exists() else []
    return config, overrides


def to_plain(node: Any) -> dict[str, Any]:
    plain = OmegaConf.to_container(node, resolve=False, enum_to_str=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def flatten(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys joined by dots.

    >>> flatten({"a": {"b": 1, "c": {}}, "d": [2]})
    {'a.b': 1, 'a.c': {}, 'd': [2]}
    """
    flat: dict[str, Any] = {}
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def read_samples(folder: Path) -> list[Mapping[str, Any]]:
    """Samples of up to `SAMPLED_STEPS` steps that lie evenly over the run, the first and the last among them."""
    found = list(samples.sample_files(folder))
    count = min(SAMPLED_STEPS, len(found))
    chosen = [found[round(index * (len(found) - 1) / max(1, count - 1))] for index in range(count)]
    return [{"step": step, "rows": list(_sample_rows(path))} for step, path in chosen]


def _sample_rows(path: Path) -> Iterator[dict[str, Any]]:
    for row in jsonl.read(path):
        logprobs = row.get("logprobs") or []
        yield {
            "prompt": row.get("prompt"),
            "question": _short(row.get("question")),
            "answer": _short(row.get("answer")),
            "completion": _short(row.get("completion")),
            "finish": row.get("finish_reason"),
            "reward": row.get("reward"),
            "parts": row.get("reward_components") or {},
            "tokens": len(row.get("tokens") or []),
            "versions": [span[0] for span in row.get("versions") or []],
            "logprob": sum(logprobs) / len(logprobs) if logprobs else None,
        }


def _short(text: str | None) -> str | None:
    if text is None or len(text) <= TEXT_LIMIT:
        return text
    half = TEXT_LIMIT // 2
    return f"{text[:half]}\n… {len(text) - TEXT_LIMIT} characters …\n{text[-half:]}"


def _mean(bucket: list[dict], name: str) -> float | None:
    values = [row[name] for row in bucket if row.get(name) is not None]
    return sum(values) / len(values) if values else None


def _label(config: Mapping[str, Any]) -> str:
    keys = ("model.name", "algorithm.name", "placement.kind", "device.kind")
    return " · ".join(str(config[key]) for key in keys if key in config)
