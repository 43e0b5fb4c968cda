"""Training data of the user's own: its preset, and no evaluation set of the data that it replaces."""

from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from app.config.model import TINY_PRESETS

TRAINING = ("data.path", "data._target_", "data.train_sets")  # settings that choose the training rows
SETS = "data.eval_sets"


def with_preset(overrides: Sequence[str]) -> list[str]:
    """Select `data=rows` where own rows replace a preset's. A tiny model has no chat template: it gets the name alone.

    >>> with_preset(["model=hf", "data.path=rows.jsonl"])
    ['data=rows', 'model=hf', 'data.path=rows.jsonl']
    """
    given = dict(each.lstrip("+").partition("=")[::2] for each in overrides)
    tiny = given.get("model", "tiny") in TINY_PRESETS
    decided = ("data", "experiment", *(("data.name", "resume") if tiny else ()))  # each of them says what the data is
    own = any(key.startswith(TRAINING) and value != "null" for key, value in given.items())
    selected = own and not any(key in given for key in decided)
    return ["data.name=rows" if tiny else "data=rows"] * selected + list(overrides)


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
