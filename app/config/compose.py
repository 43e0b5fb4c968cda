"""From Hydra's composition to a typed and validated `RunConfig`, and from its errors to one sentence."""

import copy
import difflib
import re
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, chain
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from app.config import foreign_names, own_data, peft_adapter, resolvers
from app.config.command_line import names_of
from app.config.run import RunConfig
from app.config.setting import settings
from app.errors import ConfigError, expect

# What to give in place of a choice of a group.
OWN = {
    "reward": "reward._target_=my_module.my_reward",
    "environment": "environment._target_=my_module.MyEnvironment",
    "tracking": "tracking.use=[my_module.MyTracker]",
    "data": "data.path=FILE",
    "model": "model=hf model.path=FOLDER_OR_HUB_ID",
}
CLOSE = 0.85  # similarity of a misspelled key
# Lines of Hydra's and OmegaConf's messages that do not help to correct a setting.
NOISE = ("full_key:", "object_type=", "reference_type=", "Set the env", "Config search path", "provider=", "See https:")


def register() -> None:
    """Register the schema, so that Hydra refuses misspelled keys and wrong types, and the resolvers of `conf/`.

    The entries of mappings can be given with and without `+`. A section in a mapping (`data.eval_sets.mine.path=FILE`)
    can be built up from its settings only if its type is open; `resolve` checks it.
    """
    schema = copy.deepcopy(_schema())
    for each in (each for each in settings(RunConfig) if isinstance(each.default, dict)):
        node = OmegaConf.select(schema, each.key)
        OmegaConf.set_struct(node, False)
        if any(other.key.startswith(f"{each.key}.<name>.") for other in settings(RunConfig)):
            node._metadata.element_type = Any
    ConfigStore.instance().store(name="run_schema", node=schema)
    resolvers.register()


@cache
def _schema() -> DictConfig:
    """The schema, made once: a merge copies it."""
    schema = OmegaConf.structured(RunConfig)
    assert isinstance(schema, DictConfig)
    return schema


def prepare(composed: DictConfig) -> DictConfig:
    """Return a copy of a composition with the settings of its adapter, without evaluation sets of data it replaces."""
    settings = copy.deepcopy(composed)
    own_data.remove_evaluation_of_other_data(settings)
    peft_adapter.take_settings(settings)
    return settings


def resolve(settings: DictConfig) -> RunConfig:
    """Convert prepared settings to a validated `RunConfig`. Raises `ConfigError` for unknown keys and wrong values."""
    application = OmegaConf.masked_copy(settings, [str(key) for key in settings if key != "hydra"])

    try:
        values = OmegaConf.to_container(application, resolve=True)
        config = OmegaConf.to_object(OmegaConf.merge(_schema(), values))
    except OmegaConfBaseException as error:
        raise config_error(error) from error

    assert isinstance(config, RunConfig)
    config.validate()
    given = names_of(settings.hydra.overrides.task)
    replaced = {"data.train_sets": config.data.train_sets, "data._target_": config.data._target_}
    for key, value in replaced.items():
        accepted = f"null beside {key}, which replaces it; +data.train_sets.<name>.path=FILE adds a set"
        expect("data.path" not in given or not value, "data.path", config.data.path, accepted)
    both = config.epochs is not None and "steps" in given
    expect(not both, "steps", config.steps, f"no steps with epochs={config.epochs}, which sets them, or epochs=null")
    return config


def setting_names() -> list[str]:
    """The dotted names of all sections and settings."""
    keys = [accumulate(each.key.split("."), "{}.{}".format) for each in settings(RunConfig)]
    return list(dict.fromkeys(chain.from_iterable(keys)))


def config_error(error: Exception) -> ConfigError:
    """Condense an error of Hydra or OmegaConf to the key, what is wrong with it, and what is accepted."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else ""
    key = next((line.removeprefix("full_key:").strip() for line in lines if line.startswith("full_key:")), "")

    if choice := re.search(r"Could not find '([^/]+)/(.*)'", first):
        return _unknown_choice(choice[1], choice[2], lines)

    preset = re.match(r"In '(.+)': ConfigKeyError", first)
    if unknown := preset or re.match(r"Could not override '([^']+)'|Key '(?P<missing>.+)' not in '", first):
        name = unknown[1] if unknown[1] and not preset else key or unknown["missing"]
        given = re.search(r"use \+[^=]*=(.*)", "\n".join(lines))
        source = f"the preset {preset[1]} sets it; " if preset else ""
        return _unknown_key(name, given[1] if given else foreign_names.VALUE, source)

    if variable := re.search(r"Environment variable '(.+)' not found", first):
        return ConfigError(key or "a setting", "", reason=f"there is no environment variable {variable[1]}")

    if override := re.match(r"(?:Error merging override|Ambiguous value for argument) '?([^']*)", first):
        key, _, value = override[1].lstrip("+").partition("=")
        if first.startswith("Ambiguous"):
            return ConfigError(key, value, "a list in [brackets], text in quotes, or one value; -m makes it a sweep")
        cause = _without_noise(str(error.__cause__ or "").splitlines())
        return ConfigError(key, value, _accepted(key), foreign_names.choice(f"{key}={value}") or cause)

    return ConfigError(key, "", _accepted(key), _without_noise(lines))


def _unknown_choice(group: str, choice: str, lines: Sequence[str]) -> ConfigError:
    start = next((index for index, line in enumerate(lines) if line.startswith("Available options")), len(lines))
    choices = [line for line in lines[start + 1 :] if re.fullmatch(r"\w+", line)]
    accepted = f"one of {', '.join(choices)}" if choices else "another key: there is no such group"
    if group in OWN:
        accepted += f"; your own is {OWN[group]}"
    return ConfigError(group, choice, accepted, foreign_names.choice(f"{group}={choice}"))


def _unknown_key(key: str, value: str, source: str = "") -> ConfigError:
    """Name the settings nearest to a misspelled one, or the one that another program calls so."""
    names = setting_names()
    near = difflib.get_close_matches(key, names, n=3)
    same_end = [name for name in names if name.split(".")[-1] == key.split(".")[-1]]
    if not near or len(same_end) == 1:  # train.steps is steps, not trainer.warmup_steps
        near = same_end

    hint = f"did you mean {' or '.join(near)}?" if near else "--help shows all settings"
    if other := foreign_names.answer(key, value):
        hint = other
    elif key.split(".")[0] in OWN and not difflib.get_close_matches(key, names, cutoff=CLOSE):
        hint += f"; your own is {OWN[key.split('.')[0]]}"
    return ConfigError(key, "", reason=f"{source}there is no such setting or group; {hint}")


def _accepted(key: str) -> str:
    """Return what the setting of this name accepts, also in a section of a mapping; empty for another key."""
    exact = (each for each in settings(RunConfig) if re.fullmatch(each.key.replace("<name>", r"[^.]+"), key))
    above = (each for each in settings(RunConfig) if f"{key}.".startswith(f"{each.key}."))  # an entry of a mapping
    found = next(chain(exact, above), None)
    return found.accepted if found else ""


def _without_noise(lines: Sequence[str]) -> str:
    stripped = [line.strip() for line in lines]
    message = " ".join(line for line in stripped if line and not line.startswith(NOISE))
    return message.rstrip(".").removeprefix("In 'config': ")
