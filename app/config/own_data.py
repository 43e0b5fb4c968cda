"""Own training data: its preset, and no evaluation set of the data that it replaces.

Invariants:
- An evaluation set belongs to the training data that is chosen with it. Where a later preset or the command line
  chooses other training data, the sets that nothing after that has changed are gone.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from app.config.model import TINY_PRESETS

TRAINING = ("path", "_target_", "train_sets")  # settings of `data` that choose the training rows
NONE = "data.eval_sets={}"
PRESET = "data=rows"


def with_preset(overrides: Sequence[str]) -> list[str]:
    """Select `data=rows` where training data of the user's own replaces the preset of a model.

    A tiny model keeps its preset, whose problems come without a chat template.

    >>> with_preset(["model=hf", "data.path=rows.jsonl"])
    ['data=rows', 'model=hf', 'data.path=rows.jsonl']
    """
    given = dict(each.lstrip("+").partition("=")[::2] for each in overrides)
    own = any(key.startswith(tuple(f"data.{name}" for name in TRAINING)) for key in given)
    model = given.get("model", "tiny")
    if not own or model in TINY_PRESETS or "data" in given or "experiment" in given:
        return list(overrides)
    return [PRESET, *overrides]


def remove_evaluation_of_other_data(composed: DictConfig) -> None:
    """Remove the evaluation sets of a preset whose training data the run does not use, or all that are not wanted."""
    sets = composed.data.eval_sets
    if not sets:
        return

    given: Any = OmegaConf.to_container(composed.hydra.overrides.task, resolve=False)
    unwanted = any(each.lstrip("+") == NONE for each in given)
    with open_dict(sets):
        for layer in preset(composed, "data", composed.hydra.runtime.choices.data):
            for name, published in (layer.get("eval_sets") or {}).items():
                if name in sets and (
                    unwanted or (_is_other(layer, composed.data, published) and sets[name] == published)
                ):
                    del sets[name]


def preset(composed: DictConfig, group: str, choice: str) -> list[dict[str, Any]]:
    """Read the settings of a preset, after those of the presets that it is based on, from Hydra's search path."""
    for source in composed.hydra.runtime.config_sources:
        file = Path(source.path) / group / f"{choice}.yaml"
        if source.schema == "file" and file.is_file():
            content: Any = OmegaConf.to_container(OmegaConf.load(file))
            bases = [each for each in content.get("defaults", ()) if isinstance(each, str) and each != "_self_"]
            layers = [layer for base in bases for layer in preset(composed, group, base)]
            settings = content.get(group, content)
            return [*layers, {name: value for name, value in settings.items() if name != "defaults"}]
    return [{}]


def _is_other(layer: Mapping[str, Any], data: DictConfig, evaluation: Mapping[str, Any]) -> bool:
    """Whether an evaluation set of this layer is of other data. One without a path is a split of any `data.path`."""
    if data._target_ != layer.get("_target_") or data.train_sets != layer.get("train_sets", {}):
        return True
    return evaluation.get("path") is not None and data.path != layer.get("path")
