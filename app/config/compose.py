"""From Hydra's composition to a typed and validated `RunConfig`, and from its errors to one sentence."""

import difflib
import re
from collections.abc import Sequence

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from app.config import folder_name
from app.config.help import settings_help
from app.config.run import RunConfig
from app.config.setting import settings
from app.errors import ConfigError

# Groups whose choices can be replaced by code of the user's own.
OWN = {
    "reward": "reward._target_=my_module.my_reward",
    "tracking": "tracking.use=[my_module.MyTracker]",
}
CLOSE = 0.85  # similarity of a misspelled key
# Lines of Hydra's and OmegaConf's messages that do not help to correct a setting.
NOISE = ("full_key:", "object_type=", "reference_type=", "Set the env", "Config search path", "provider=", "See https:")


def register() -> None:
    """Register the schema, so that Hydra refuses misspelled keys and wrong types, and the resolvers of `conf/`."""
    ConfigStore.instance().store(name="run_schema", node=RunConfig)
    OmegaConf.register_new_resolver("settings_help", settings_help, replace=True)
    folder_name.register()


def resolve(composed: DictConfig) -> RunConfig:
    """Convert a composition to a validated `RunConfig`.

    Raises:
        ConfigError: A key is not in the schema (also one added with `+`), or a value is not accepted.
    """
    application = OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])

    try:
        values = OmegaConf.to_container(application, resolve=True)
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RunConfig), values))
    except OmegaConfBaseException as error:
        raise ConfigError(one_sentence(error)) from error

    assert isinstance(config, RunConfig)
    config.validate()
    return config


def setting_names() -> list[str]:
    """The dotted names of all sections and settings."""
    names: dict[str, None] = {}
    for each in settings(RunConfig):
        words = each.key.split(".")
        names.update(dict.fromkeys(".".join(words[:count]) for count in range(1, len(words) + 1)))
    return list(names)


def one_sentence(error: Exception) -> str:
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

    if override := re.match(r"Error merging override (.*)", first):
        return _wrong_type(override[1], error)

    message = _without_noise(lines)
    return message if not key or key in message else f"{key}: {message}"


def _unknown_choice(group: str, choice: str, lines: Sequence[str]) -> str:
    """Name the choices of a group, which Hydra lists one on a line."""
    start = next((index for index, line in enumerate(lines) if line.startswith("Available options")), len(lines))
    choices = [line for line in lines[start + 1 :] if re.fullmatch(r"\w+", line)]
    accepted = f"one of {', '.join(choices)}" if choices else "another key: there is no such group"
    if group in OWN:
        accepted += f"; your own is {OWN[group]}"
    return f"{group}={choice} is not accepted: give {accepted}."


def _unknown_key(key: str, override: str = "") -> str:
    """Name the settings nearest to a misspelled one, or what adds the entry of `override` to a mapping."""
    if addition := _addition(override):
        return f"{override} is not accepted: write {addition}."

    if section := _section(key, override):
        return section

    if accepted := _accepted(key):
        return f"{key} is not accepted: give {accepted}."

    names = setting_names()
    near = difflib.get_close_matches(key, names, n=3)
    if not near:
        near = [name for name in names if name.split(".")[-1] == key.split(".")[-1]]

    hint = f"did you mean {' or '.join(near)}?" if near else "--help shows all settings."
    section = key.split(".")[0]
    if section in OWN and not difflib.get_close_matches(key, names, cutoff=CLOSE):
        hint += f" Your own is {OWN[section]}."
    return f"{key} is not a setting or group: {hint}"


def _wrong_type(override: str, error: Exception) -> str:
    """Name the accepted values of a setting that was given a value of another type."""
    key = override.lstrip("+").split("=")[0]
    accepted = _accepted(key)
    cause = _without_noise(str(error.__cause__ or "").splitlines())

    addition = _addition(override)
    if addition is not None and addition.strip("'+") != override.lstrip("+"):
        return f"{override} is not accepted: write {addition}."

    if section := _section(key, override):
        return section

    if accepted is None or cause.startswith("Key "):
        return f"{override} is not accepted: {cause}"

    return f"{override} is not accepted: give {accepted}."


def _accepted(key: str) -> str | None:
    """What the setting of this name, or the mapping that it is an entry of, accepts."""
    return next((each.accepted for each in settings(RunConfig) if f"{key}.".startswith(f"{each.key}.")), None)


def _section(key: str, override: str) -> str | None:
    """Name a setting of the section that `override` assigns to; None if it does not assign to a section."""
    names = setting_names()
    if key not in names or key in [each.key for each in settings(RunConfig)]:
        return None

    example = next(name for name in names if name.startswith(f"{key}."))
    return f"{override} is not accepted: give one of the settings of {key}, such as {example}; --help shows them."


def _addition(override: str) -> str | None:
    """Return the override that adds an entry to a mapping; None if this one does not name an entry.

    >>> _addition("reward.args.bonus=0.5")
    '+reward.args.bonus=0.5'
    >>> _addition("data.eval_sets.mine.path=eval.jsonl")  # Hydra adds a section only with its mapping
    "'++data.eval_sets={mine: {path: eval.jsonl}}'"
    """
    key, _, value = override.lstrip("+").partition("=")
    mappings = [each.key for each in settings(RunConfig) if isinstance(each.default, dict)]
    mapping = next((each for each in mappings if f"{key}.".startswith(f"{each}.")), None)
    if mapping is None:
        return None
    if key == mapping:
        return f"'++{key}={value}'" if value.startswith("{") else None

    entry = key.removeprefix(f"{mapping}.")
    names = setting_names()
    if not any(name.startswith(f"{mapping}.<name>.") for name in names):
        return f"+{mapping}.{entry}={value}"

    name, _, field = entry.partition(".")
    if field and f"{mapping}.<name>.{field}" not in names:
        return None
    content = f"{{{field}: {value}}}" if field else value
    return f"'++{mapping}={{{name}: {content}}}'"


def _without_noise(lines: Sequence[str]) -> str:
    stripped = [line.strip() for line in lines]
    message = " ".join(line for line in stripped if line and not line.startswith(NOISE))
    return message.rstrip(".").removeprefix("In 'config': ") + "."
