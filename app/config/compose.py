"""From what Hydra composed to a typed, validated `RunConfig`, and from its errors to one sentence."""

import difflib
import re
from dataclasses import MISSING, fields, is_dataclass

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from app.config.run import RunConfig, validate
from app.errors import ConfigError


def register() -> None:
    """Make the schema known to Hydra, so that a misspelt key or a wrong type fails while composing."""
    ConfigStore.instance().store(name="run_schema", node=RunConfig)


def resolve(composed: DictConfig) -> RunConfig:
    """The typed configuration; a key that is not in the schema (also one added with `+`) is refused."""
    plain = OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])
    try:
        typed = OmegaConf.merge(OmegaConf.structured(RunConfig), OmegaConf.to_container(plain, resolve=True))
        config = OmegaConf.to_object(typed)
    except OmegaConfBaseException as error:
        raise ConfigError(sentence(error)) from error
    assert isinstance(config, RunConfig)
    validate(config)
    return config


def sentence(error: Exception) -> str:
    """One line of a Hydra or OmegaConf error: the key, what is wrong with it, and what would be accepted."""
    lines = [line.strip() for line in str(error).splitlines()]
    cause = error.__cause__
    if cause is not None and lines and lines[0].startswith("Error merging override"):
        lines[0] = lines[0].removeprefix("Error merging override").strip() + " is not accepted:"
        lines += [line.strip() for line in str(cause).splitlines()]
    if choice := re.search(r"Could not find '(.+)/([^/]*)'", lines[0] if lines else ""):
        start = next((at for at, line in enumerate(lines) if line.startswith("Available options")), len(lines))
        options = ", ".join(line for line in lines[start + 1 :] if re.fullmatch(r"\w+", line))
        return f"{choice[1]}={choice[2]} is not accepted: give one of {options or 'none: there is no such group'}."
    key = next((line.removeprefix("full_key:").strip() for line in lines if line.startswith("full_key:")), "")
    unknown = re.match(r"Could not override '([^']+)'", lines[0]) if lines else None
    if unknown or (lines and re.match(r"Key '.+' not in '", lines[0])):
        return _no_such_key(unknown.group(1) if unknown else key or lines[0].split("'")[1])
    noise = ("full_key:", "object_type=", "reference_type=", "Set the env", "Config search path", "provider=")
    told = " ".join(line for line in lines if line and not line.startswith(noise)).rstrip(".")
    told = told.removeprefix("In 'config': ")
    return f"{told}." if not key or key in told else f"{key}: {told}."


def _no_such_key(key: str) -> str:
    """Name the nearest settings, which is what a misspelling needs."""
    names = setting_names(RunConfig)
    near = difflib.get_close_matches(key, names, n=3) or [n for n in names if n.split(".")[-1] == key.split(".")[-1]]
    hint = f"did you mean {' or '.join(near)}?" if near else "--cfg job shows all settings."
    return f"{key} is not a setting or group: {hint}"


def setting_names(schema: type, prefix: str = "") -> list[str]:
    """The dotted names of all settings and groups."""
    names: list[str] = []
    for each in fields(schema):
        names.append(prefix + each.name)
        nested = each.default_factory() if each.default_factory is not MISSING else None
        if is_dataclass(nested) and not isinstance(nested, type):
            names += setting_names(type(nested), f"{prefix}{each.name}.")
    return names
