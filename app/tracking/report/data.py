"""The contents of a run folder, as the report shows them.

Invariants:
- Any run folder can be read: of a running or a killed run, and with files missing.
- The page's size is bounded for any run length: at most `POINTS` points per curve and `SAMPLED_STEPS` steps of samples,
  both spread evenly over the run.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from app.config import Mode, RunConfig
from app.tracking.number_format import MISSING
from app.tracking.run_folder import WARNINGS, flatten, is_aside, metrics_file, read_config, samples, summary

POINTS = 600
SAMPLED_STEPS = 40
TEXT_LIMIT = 6000  # characters per question or completion
TURN_LIMIT = 2000  # characters per turn of an episode
MAX_TURNS = 30  # of an episode: its first and its last ones


@dataclass(frozen=True, slots=True)
class RunData:
    """One run. Missing files leave their fields empty."""

    folder: Path
    summary: Mapping[str, Any]
    rows: list[dict[str, Any]]  # `metrics.jsonl`: one for each step
    config: Mapping[str, Any]  # dotted key → value
    overrides: list[str]  # of the command line
    warnings: list[Mapping[str, Any]]  # time, step, text
    samples: list[Mapping[str, Any]]  # step, rows

    def values(self, name: str) -> list[float]:
        return [value for row in self.rows if (value := row.get(name)) is not None]

    @property
    def imitates(self) -> bool:
        """Whether this is a run of `mode=sft`."""
        return bool(self.config.get("mode") == Mode.sft.name)

    @property
    def is_evaluation(self) -> bool:
        """Whether this is a run of `mode=eval`, which has no training steps."""
        return bool(self.config.get("mode") == Mode.eval.name)

    @property
    def label(self) -> str:
        """Model · algorithm, or sft · placement · device."""
        keys = ("model.name", "mode" if self.imitates else "algorithm.name", "placement.kind", "device.kind")
        return " · ".join(str(self.config[key]) for key in keys if key in self.config) or self.folder.name

    @property
    def changed(self) -> dict[str, tuple[Any, Any]]:
        """Settings in use that differ from the schema's defaults: key → (default, value)."""
        defaults = flatten(OmegaConf.structured(RunConfig))
        unused = ("reward.components.",) if self.config.get("reward._target_") else ()
        return {
            key: (defaults.get(key, MISSING), value)
            for key, value in self.config.items()
            if defaults.get(key, MISSING) != value and value not in ({}, [], None) and not key.startswith(unused)
        }


def read_run(folder: Path) -> RunData:
    """Read a run folder."""
    config, overrides = read_config(folder)
    warnings: dict[str, Mapping[str, Any]] = {}  # by text: a resumed run repeats those of its start
    for warning in metrics_file.read(folder / WARNINGS):
        warnings.setdefault(str(warning.get("text")), warning)

    return RunData(
        folder=folder,
        summary=summary.read(folder),
        rows=list(metrics_file.read(folder / metrics_file.NAME)),
        config=config,
        overrides=overrides,
        warnings=list(warnings.values()),
        samples=_samples(folder, "eval" if config.get("mode") == Mode.eval.name else "step"),
    )


def find_runs(folder: Path) -> list[Path]:
    """Return the run folders at or below `folder` (a sweep's, or `outputs`), sorted by path.

    Symbolic links are followed, and a run that is reached twice is returned once. Records that were set aside are
    included only if `folder` points at them.
    """
    found: list[Path] = []
    visited: set[Path] = set()
    for name, folders, files in os.walk(folder, followlinks=True):
        path = Path(name)
        known = path.resolve() in visited  # links can make a loop
        visited.add(path.resolve())
        if metrics_file.NAME in files and not known:
            found.append(path)
        if metrics_file.NAME in files or known:
            folders.clear()
        folders[:] = sorted(each for each in folders if not is_aside(each))
    return sorted(found)


def curves(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return `steps` and `series`, the values of each metric with six digits, for the page.

    They are averaged over buckets of steps, so that at most `POINTS` remain.
    """
    size = max(1, -(-len(rows) // POINTS))
    buckets = [rows[start : start + size] for start in range(0, len(rows), size)]

    names = sorted({name for row in rows for name in row} - {"step"})
    steps = [bucket[-1]["step"] for bucket in buckets]
    series: dict[str, list[float | None]] = {}
    for name in names:
        measured = [[row[name] for row in bucket if row.get(name) is not None] for bucket in buckets]
        series[name] = [float(f"{sum(values) / len(values):.6g}") if values else None for values in measured]
    return {"steps": steps, "series": series}


def _samples(folder: Path, kind: str) -> list[Mapping[str, Any]]:
    """Return the samples of up to `SAMPLED_STEPS` evenly spaced steps, the first and the last included."""
    files = samples.sample_files(folder, kind)
    count = min(SAMPLED_STEPS, len(files))
    chosen = [files[round(index * (len(files) - 1) / max(1, count - 1))] for index in range(count)]
    return [{"step": step, "rows": list(_sample_rows(path))} for step, path in chosen]


def _sample_rows(path: Path) -> Iterator[dict[str, Any]]:
    for row in metrics_file.read(path):
        # Of an episode, tokens and log-probabilities are those that were sampled in all of its sequences.
        sequences = row.get("sequences") or [row]
        logprobs = [value for sequence in sequences for value in sequence.get("logprobs") or []]
        yield {
            "prompt": row.get("prompt"),
            "question": _short(row.get("prompt_text", row.get("question"))),  # earlier runs have the text there
            "answer": _short(row.get("answer")),
            "completion": _short(row.get("completion")),
            "finish": row.get("finish_reason"),
            "reward": row.get("reward"),
            "components": row.get("reward_components") or {},
            "tokens": len(logprobs),
            "versions": [span[0] for sequence in sequences for span in sequence.get("versions") or []],
            "logprob": sum(logprobs) / len(logprobs) if logprobs else None,
            **_episode(row),
        }


def _episode(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a sample of several turns shows in addition; nothing of a single turn."""
    turns = row.get("turns") or []
    if not turns:
        return {}

    shown = [{**turn, "text": _short(turn.get("text"), TURN_LIMIT)} for turn in turns]
    if left_out := max(0, len(turns) - MAX_TURNS):
        gap = {"role": "", "text": f"… {left_out} turns …", "tokens": 0, "seconds": 0}
        shown = [*shown[: MAX_TURNS // 2], gap, *shown[-MAX_TURNS // 2 :]]
    return {
        "turns": shown,
        "ending": row.get("ending"),
        "scores": row.get("scores") or {},
        "sequences": len(row.get("sequences") or []),
    }


def _short(text: str | None, limit: int = TEXT_LIMIT) -> str | None:
    if text is None or len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n… {len(text) - limit} characters …\n{text[-half:]}"
