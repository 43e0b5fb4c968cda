"""The files of a run's folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

PROMPTS = "prompts.jsonl"  # prompt ids of each step
WARNINGS = "logs/warnings.jsonl"
CONFIG = "config"  # folder of the composed configuration


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
