"""The saved configuration of a run: written with absolute paths, read, and taken over by a command that resumes it.

Numbers and flags that refer to the environment are saved resolved. A text may be a secret: its reference is saved.
"""

import glob
import os
import re
from collections.abc import Collection, Mapping
from copy import deepcopy
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, Node, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from app.config import RunConfig
from app.config.command_line import names_of
from app.config.compose import config_error
from app.config.model import TINY_PRESETS
from app.errors import ConfigError, yaml_text
from app.tracking.run_folder import CONFIG, flatten
from app.utils.files import replace_file

SAVED = Path(CONFIG) / "config.yaml"
PATHS = ("path", "eval_path", "demonstrations", "chat_template")  # settings of files
REFERENCE = "${oc.env:"
ALWAYS = ("hydra", "mode", "resume")  # never taken from the saved configuration
TEACHERS = ("teacher.urls",)  # they may move, but their term of the loss may not come or go


def save(settings: DictConfig, folder: Path) -> None:
    """Write the settings of the run in `folder`."""
    raw, resolved = (OmegaConf.to_container(settings, resolve=each, enum_to_str=True) for each in (False, True))
    replace_file(folder / SAVED, OmegaConf.to_yaml(absolute_paths(_with_references(raw, resolved, flatten(raw)))))


def load(folder: Path) -> DictConfig:
    """Load the settings of a run. Raises `ConfigError` if they are not those of this version."""
    try:
        saved = OmegaConf.merge(OmegaConf.structured(RunConfig), OmegaConf.load(folder / SAVED))
    except OmegaConfBaseException as error:
        why = f"{SAVED} is not a configuration of this version: {config_error(error)}"
        raise ConfigError("resume", folder, reason=why) from error
    assert isinstance(saved, DictConfig)
    return saved


def take_over(
    settings: DictConfig, saved: DictConfig, folder: Path, changeable: Collection[str]
) -> tuple[DictConfig, tuple[str, ...]]:
    """Return the saved settings with this command's overrides, and their changes; `ConfigError` for what must stay."""
    given = [key for key in names_of(settings.hydra.overrides.task) if not _is_in(key, ALWAYS)]
    sections = [str(key) for key in saved if key not in ALWAYS]
    # The presets of a group without a section (`experiment`) may set anything. A data preset selects its reward.
    keys = {*given, *(sections if any("." not in key and key not in sections for key in given) else ())}
    keys |= {"reward"} if "data" in keys and "reward" in changeable else set()

    merged = deepcopy(settings)
    with open_dict(merged):
        for key in sections:
            merged[key] = saved[key]
        for key in sorted((key for key in keys if "." in key or key in sections), key=lambda key: key.count(".")):
            words = key.split(".")
            parts = (".".join(words[:count]) for count in range(1, len(words) + 1))
            missing = next((each for each in parts if not _is_mapping(_node(merged, each))), key)  # an evaluation set
            section, _, name = missing.rpartition(".")
            if (node := _node(settings, missing)) is not None:
                OmegaConf.update(merged, missing, deepcopy(node), merge=False)
            elif _node(merged, missing) is not None:  # `~key` on the command line
                del OmegaConf.select(merged, section)[name]
        if "steps" in given and "epochs" not in given:
            merged.epochs = None

    changes = _changes(saved, merged, folder, changeable)
    return merged, (f"overrides of the run in {folder}: {', '.join(changes)}",) if changes else ()


def _changes(saved: DictConfig, merged: DictConfig, folder: Path, changeable: Collection[str]) -> list[str]:
    """Return the differences for the screen. Raises `ConfigError` for a setting that must stay."""
    before, after = _leaves(saved), _leaves(merged)
    raw_before, raw_after = flatten(saved), flatten(merged)
    changes: list[str] = []
    for name in (name for name in {**before, **after} if before.get(name) != after.get(name)):
        was, now = before.get(name, "null"), after.get(name, "null")
        stays = not _is_in(name, changeable) or (_is_in(name, TEACHERS) and not {"null", "[]"}.isdisjoint((was, now)))
        # The value of a reference may be a secret.
        was, now = (
            yaml_text(raw[name]) if _refers(raw.get(name), raw) else value
            for raw, value in ((raw_before, was), (raw_after, now))
        )
        if stays:
            why = f"the run in {folder} has {name}={was}; start another run from its model, see mode=export"
            raise ConfigError(name, now, reason=why)
        changes.append(f"{name}={now} (was {was})")
    return changes


def _leaves(settings: DictConfig) -> Mapping[str, str]:
    """Return the settings as texts by their dotted names, those that are left to the schema included."""
    known = OmegaConf.masked_copy(settings, [str(key) for key in settings if key not in ALWAYS])
    complete = OmegaConf.merge(OmegaConf.structured(RunConfig), OmegaConf.to_container(known))
    values = flatten(absolute_paths(_resolved(complete)))
    return {key: yaml_text(value) for key, value in values.items() if value != {} and key not in ALWAYS}


def _node(settings: DictConfig, key: str) -> Node | None:
    """Return a setting with its references as they are written; None where there is none."""
    section, _, name = key.rpartition(".")
    parent: Any = OmegaConf.select(settings, section) if section else settings
    return parent._get_node(name) if _is_mapping(parent) else None


def _is_mapping(node: Any) -> bool:
    return isinstance(node, DictConfig) and not node._is_none() and not node._is_interpolation()


def _resolved(node: Any) -> Any:
    """Return plain values. What does not resolve, as where a variable is not set, stays as it is written."""
    if _is_mapping(node):
        return {key: _resolved(node._get_node(key)) for key in node}
    try:
        found = node._dereference_node()
        plain = OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found._value()
    except OmegaConfBaseException:
        plain = OmegaConf.to_container(node, resolve=False) if OmegaConf.is_config(node) else node._value()
    return plain.name if isinstance(plain, Enum) else plain


def _refers(value: Any, texts: Mapping[str, Any]) -> bool:
    """Whether a value refers to the environment, itself or by the settings that it names."""
    named = re.findall(r"\$\{([\w.]+)\}", str(value))
    return REFERENCE in str(value) or any(_refers(texts[key], texts) for key in texts if _is_in(key, named))


def _is_in(key: str, names: Collection[str]) -> bool:
    """Whether a key is one of the settings or sections `names`, or below one."""
    return any(f"{key}.".startswith(f"{name}.") for name in names)


def absolute_paths(settings: Any, name: str = "") -> Any:
    """Return plain values of settings with the files and folders that exist by their absolute paths."""
    if isinstance(settings, dict):
        return {key: absolute_paths(value, str(key)) for key, value in settings.items()}
    if isinstance(settings, list):
        return [absolute_paths(each, name) for each in settings]
    if name not in PATHS or not isinstance(settings, str) or "${" in settings or settings in TINY_PRESETS.values():
        return settings
    path = os.path.expanduser(settings)
    return os.path.abspath(path) if os.path.exists(path) or glob.has_magic(path) else settings  # the id of a hub


def _with_references(raw: Any, resolved: Any, texts: Mapping[str, Any]) -> Any:
    """Return the resolved values, but texts that refer to the environment as they were given."""
    if isinstance(raw, dict):
        return {key: _with_references(value, resolved[key], texts) for key, value in raw.items()}
    if isinstance(raw, list):
        return [_with_references(*pair, texts) for pair in zip(raw, resolved, strict=True)]
    return raw if isinstance(raw, str) and _refers(raw, texts) and not _is_number(resolved) else resolved


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)
