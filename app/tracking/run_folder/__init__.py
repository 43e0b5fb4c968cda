"""The files of a run's folder, and what is set aside in it.

Records that a run does not continue from move to `aside_<n>/` in its folder and keep their names: those after the step
that it is resumed from, or all of a run that ended before its first checkpoint and starts over. Nothing is deleted, but
a resumed run writes its timeline and its report anew.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from app.tracking.run_folder import metrics_file, samples, summary, timeline

PROMPTS = "prompts.jsonl"  # prompt ids of each step
WARNINGS = "logs/warnings.jsonl"
CONFIG = "config"  # folder of the composed configuration
ASIDE = "aside_"
STEPPED = (metrics_file.NAME, PROMPTS, WARNINGS)  # one JSON object with a `step` per line
OTHERS = (samples.FOLDER, summary.NAME, timeline.NAME, "report.html", CONFIG)
ALL = (metrics_file.NAME, PROMPTS, *OTHERS, "export", "final", "logs", "profile", "tracking")


def read_config(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Return a run's composed configuration with dotted keys, and the overrides of its command line."""
    config = folder / CONFIG / "config.yaml"
    overrides = folder / CONFIG / "overrides.yaml"
    given: Any = OmegaConf.to_container(OmegaConf.load(overrides), resolve=False) if overrides.exists() else []
    return flatten(OmegaConf.load(config)) if config.exists() else {}, list(map(str, given))


def flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    """Join the nested keys of a configuration with dots; enums become their names.

    >>> flatten({"a": {"b": 1, "c": {}}, "d": [2]})
    {'a.b': 1, 'a.c': {}, 'd': [2]}
    """
    if OmegaConf.is_config(node):
        node = OmegaConf.to_container(node, resolve=False, enum_to_str=True)

    flat: dict[str, Any] = {}
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def is_aside(name: str) -> bool:
    """Whether a folder of this name has records that were set aside."""
    return name.startswith(ASIDE) and name.removeprefix(ASIDE).isdecimal()


def set_all_aside(folder: Path) -> Path:
    """Move all records of the run in `folder`. Returns where to."""
    aside = _next_aside(folder)
    aside.mkdir()
    for name in ALL:
        if (folder / name).exists():
            (folder / name).rename(aside / name)
    return aside


def set_later_aside(folder: Path, step: int) -> Path | None:
    """Move the records of steps after `step`. Returns where to, or None if there are none."""
    aside = _next_aside(folder)
    for name in STEPPED:
        metrics_file.move_after(folder / name, step, aside / name)
    samples.move_after(folder, step, aside)
    return aside if aside.exists() else None


def _next_aside(folder: Path) -> Path:
    used = [int(path.name.removeprefix(ASIDE)) for path in folder.glob(f"{ASIDE}*") if is_aside(path.name)]
    return folder / f"{ASIDE}{max(used, default=0) + 1}"
