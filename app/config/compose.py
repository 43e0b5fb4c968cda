"""From Hydra's composition to a typed and validated `RunConfig`, and from its errors to one sentence."""

import copy
import difflib
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from app.config import foreign_names, own_data, peft_adapter, resolvers
from app.config.command_line import given_settings
from app.config.command_line import override as quoted
from app.config.run import RunConfig
from app.config.setting import Setting, settings
from app.errors import ConfigError, expect, yaml_text

# Groups whose choices can be replaced by code of the user's own.
OWN = {
    "reward": "reward._target_=my_module.my_reward",
    "environment": "environment._target_=my_module.MyEnvironment",
    "tracking": "tracking.use=[my_module.MyTracker]",
}
CLOSE = 0.85  # similarity of a misspelled key
# Lines of Hydra's and OmegaConf's messages that do not help to correct a setting.
NOISE = ("full_key:", "object_type=", "reference_type=", "Set the env", "Config search path", "provider=", "See https:")


def register() -> None:
    """Register the schema, so that Hydra refuses misspelled keys and wrong types, and the resolvers of `conf/`."""
    ConfigStore.instance().store(name="run_schema", node=_open_schema())
    resolvers.register()


@cache
def _schema() -> DictConfig:
    """The schema, made once: a merge copies it."""
    schema = OmegaConf.structured(RunConfig)
    assert isinstance(schema, DictConfig)
    return schema


def _open_schema() -> DictConfig:
    """The schema for Hydra, in which the entries of mappings can be given with and without `+`.

    A section in a mapping (`data.eval_sets.mine.path=FILE`) can be built up from its settings only if its type is open;
    `resolve` checks it.
    """
    schema = copy.deepcopy(_schema())
    for each in _mappings():
        node = OmegaConf.select(schema, each.key)
        OmegaConf.set_struct(node, False)
        if _first_of_section(each.key) is not None:
            node._metadata.element_type = Any
    return schema


def _mappings() -> list[Setting]:
    return [each for each in settings(RunConfig) if isinstance(each.default, dict)]


def _first_of_section(mapping: str) -> str | None:
    """The first setting of the sections in a mapping (`path`); None for a mapping of plain values."""
    prefix = f"{mapping}.<name>."
    return next((each.key.removeprefix(prefix) for each in settings(RunConfig) if each.key.startswith(prefix)), None)


def _require_sections(values: Any) -> None:
    """Raise `ConfigError` for an entry of a mapping of sections that is a plain value: `data.eval_sets.mine=FILE`."""
    for mapping in _mappings():
        first = _first_of_section(mapping.key)
        section, _, field = mapping.key.partition(".")
        entries = (values.get(section) or {}).get(field)
        if first is None or not isinstance(entries, Mapping):
            continue

        for name, entry in entries.items():
            if not isinstance(entry, Mapping):
                key = f"{mapping.key}.{name}"
                raise ConfigError(key, entry, reason=f"write {key}.{first}={yaml_text(entry)}")


def prepare(composed: DictConfig) -> DictConfig:
    """Return a copy of a composition with the settings of its adapter, without evaluation sets of data it replaces."""
    settings = copy.deepcopy(composed)
    own_data.remove_evaluation_of_other_data(settings)
    peft_adapter.take_settings(settings)
    return settings


def resolve(settings: DictConfig) -> RunConfig:
    """Convert prepared settings to a validated `RunConfig`.

    Raises:
        ConfigError: A key is not in the schema (also one added with `+`), or a value is not accepted.
    """
    application = OmegaConf.masked_copy(settings, [str(key) for key in settings if key != "hydra"])

    try:
        values = OmegaConf.to_container(application, resolve=True)
        _require_sections(values)
        config = OmegaConf.to_object(OmegaConf.merge(_schema(), values))
    except OmegaConfBaseException as error:
        raise config_error(error) from error

    assert isinstance(config, RunConfig)
    config.validate()
    given = given_settings()
    replaced = {"data.train_sets": config.data.train_sets, "data._target_": config.data._target_}
    for key, value in replaced.items():
        accepted = f"null beside {key}, which replaces it; +data.train_sets.<name>.path=FILE adds a set"
        expect("data.path" not in given or not value, "data.path", config.data.path, accepted)
    both = config.epochs is not None and "steps" in given
    expect(not both, "steps", config.steps, f"no steps with epochs={config.epochs}, which sets them, or epochs=null")
    return config


def setting_names() -> list[str]:
    """The dotted names of all sections and settings."""
    names: dict[str, None] = {}
    for each in settings(RunConfig):
        words = each.key.split(".")
        names.update(dict.fromkeys(".".join(words[:count]) for count in range(1, len(words) + 1)))
    return list(names)


def config_error(error: Exception) -> ConfigError:
    """Condense an error of Hydra or OmegaConf to the key, what is wrong with it, and what is accepted."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else ""
    key = next((line.removeprefix("full_key:").strip() for line in lines if line.startswith("full_key:")), "")

    if choice := re.search(r"Could not find '(.+)/([^/]*)'", first):
        return _unknown_choice(choice[1], choice[2], lines)

    if override := re.match(r"Could not override '([^']+)'", first):
        appended = re.search(r"use \+(.*)", "\n".join(lines))
        return _unknown_key(override[1], appended[1] if appended else "")

    if missing := re.match(r"Key '(.+)' not in '", first):
        return _unknown_key(key or missing[1])

    if preset := re.match(r"In '(.+)': ConfigKeyError", first):
        unknown = _unknown_key(key)
        return ConfigError(key, "", unknown.accepted, f"the preset {preset[1]} sets it; {unknown.reason}")

    if twice := re.match(r"Multiple values for ([^.]+)\.", first):
        return ConfigError(f"+{twice[1]}", "…", reason=f"write {twice[1]}=<choice>, without the plus and once")

    if override := re.match(r"Error merging override (.*)", first):
        return _wrong_type(override[1], error)

    if ambiguous := re.match(r"Ambiguous value for argument '(.*)'$", first):
        return _several_values(ambiguous[1])

    if variable := re.search(r"Environment variable '(.+)' not found", first):
        return ConfigError(key or "a setting", "", reason=f"there is no environment variable {variable[1]}")

    if entry := _wrong_entry(key, first):
        return entry

    return ConfigError(key, "", reason=_without_noise(lines))


def _unknown_choice(group: str, choice: str, lines: Sequence[str]) -> ConfigError:
    """Name the choices of a group, which Hydra lists one on a line."""
    start = next((index for index, line in enumerate(lines) if line.startswith("Available options")), len(lines))
    choices = [line for line in lines[start + 1 :] if re.fullmatch(r"\w+", line)]
    accepted = f"one of {', '.join(choices)}" if choices else "another key: there is no such group"
    if group in OWN:
        accepted += f"; your own is {OWN[group]}"
    return ConfigError(group, choice, accepted, foreign_names.choice(f"{group}={choice}"))


def _unknown_key(key: str, override: str = "") -> ConfigError:
    """Name the settings nearest to a misspelled one."""
    if section := _section(key, override):
        return section

    if accepted := _accepted(key):
        return ConfigError(key, "", accepted)

    value = override.partition("=")[2] or foreign_names.VALUE
    if other := foreign_names.answer(key, value):
        return ConfigError(key, "", reason=f"there is no such setting or group; {other}")

    names = setting_names()
    near = difflib.get_close_matches(key, names, n=3)
    same_end = [name for name in names if name.split(".")[-1] == key.split(".")[-1]]
    if not near or len(same_end) == 1:  # train.steps is steps, not trainer.warmup_steps
        near = same_end

    hint = f"did you mean {' or '.join(near)}?" if near else "--help shows all settings"
    group = key.split(".")[0]
    if group in OWN and not difflib.get_close_matches(key, names, cutoff=CLOSE):
        hint += f"; your own is {OWN[group]}"
        if f"{group}.args" in names and key.count(".") == 1:
            hint += f"; its arguments are +{group}.args.{key.partition('.')[2]}={value}"
    return ConfigError(key, "", reason=f"there is no such setting or group; {hint}")


def _several_values(override: str) -> ConfigError:
    """Say how to write values with commas between them: as a list, as text, or as a sweep."""
    key, _, value = override.partition("=")
    accepted = _accepted(key) or ""  # empty: a group

    sweep = "add -m for a sweep"
    if "a list of" in accepted:
        return ConfigError(key, value, reason=f"write '{key}=[{value}]', or {sweep}")
    if accepted.endswith("text"):
        return ConfigError(key, value, reason=f"write {quoted(key, value)}, or {sweep}")
    return ConfigError(key, value, f"one value, or {sweep}")


def _wrong_type(override: str, error: Exception) -> ConfigError:
    """Name the accepted values of a setting that was given a value of another type."""
    key, _, value = override.lstrip("+").partition("=")
    accepted = _accepted(key)
    cause = _without_noise(str(error.__cause__ or "").splitlines())

    if section := _section(key, override):
        return section

    if accepted is None or cause.startswith("Key "):
        return ConfigError(key, value, reason=cause)

    return ConfigError(key, value, accepted, foreign_names.choice(f"{key}={value}"))


def _wrong_entry(key: str, message: str) -> ConfigError | None:
    """Name what is accepted for an entry of a mapping, or for a setting of that entry; None for other keys."""
    accepted = _accepted(key)
    if accepted is None or not any(key.startswith(f"{each.key}.") for each in _mappings()):
        return None

    value = re.match(r"Value '(.*)' of type", message)
    return ConfigError(key, value[1] if value else "", accepted)


def _accepted(key: str) -> str | None:
    """What the setting of this name accepts, also in a section of a mapping, or the mapping that it is an entry of."""
    found: str | None = None
    for each in settings(RunConfig):
        pattern = re.escape(each.key).replace("<name>", r"[^.]+")
        if re.fullmatch(pattern, key):
            return each.accepted
        if f"{key}.".startswith(f"{each.key}."):
            found = found or each.accepted
    return found


def _section(key: str, override: str) -> ConfigError | None:
    """Name a setting of the section that `override` assigns to; None if it does not assign to a section."""
    names = setting_names()
    if key not in names or key in [each.key for each in settings(RunConfig)]:
        return None

    example = next(name for name in names if name.startswith(f"{key}."))
    accepted = f"one of the settings of {key}, such as {example}; --help shows them"
    return ConfigError(key, override.partition("=")[2], accepted)


def _without_noise(lines: Sequence[str]) -> str:
    stripped = [line.strip() for line in lines]
    message = " ".join(line for line in stripped if line and not line.startswith(NOISE))
    return message.rstrip(".").removeprefix("In 'config': ") + "."
