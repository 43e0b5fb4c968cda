"""Training data of the user's own: its preset, and no evaluation set of the data that it replaces."""

from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from app.config.model import TINY_PRESETS

TRAINING = ("data.path", "data._target_", "data.train_sets")  # settings that choose the training rows
SETS = "data.eval_sets"


def with_preset(overrides: Sequence[str]) -> list[str]:
    """Select `data=rows` where own training data replaces a preset; a tiny model, which has no template, gets its name.

    >>> with_preset(["model=hf", "data.path=rows.jsonl"])
    ['data=rows', 'model=hf', 'data.path=rows.jsonl']
    """
    given = dict(each.lstrip("+").partition("=")[::2] for each in overrides)
    own = any(key.startswith(TRAINING) for key in given)
    model = given.get("model", "tiny")
    if not own or "data" in given or "experiment" in given:
        return list(overrides)
    return ["data.name=rows" if model in TINY_PRESETS else "data=rows", *overrides]


def remove_evaluation_of_other_data(composed: DictConfig) -> None:
    """Remove evaluation sets of a preset whose training rows the command line replaces, or all with `{}`."""
    given: Any = OmegaConf.to_container(composed.hydra.overrides.task, resolve=False)
    written = [each.lstrip("+") for each in given]
    all_sets = f"{SETS}={{}}" in written or any(each.startswith(TRAINING[1:]) for each in written)
    other_path = any(each.startswith("data.path=") for each in written)  # a set without a path is one of its splits
    sets = composed.data.eval_sets
    with open_dict(sets):
        for name, evaluation in [*sets.items()]:
            own = any(
                each.startswith(f"{SETS}.{name}.") or (each.startswith(f"{SETS}=") and f"{name}:" in each)
                for each in written
            )
            if not own and (all_sets or (other_path and evaluation.get("path") is not None)):
                del sets[name]
