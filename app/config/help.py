"""Parts of `--help`: the name of the command, and a table of every setting with value, accepted values and meaning."""

import inspect
import json
import textwrap
from collections.abc import Iterator
from enum import Enum

from omegaconf import DictConfig, ListConfig, OmegaConf

from app.config.run import RunConfig
from app.config.setting import Setting, settings

WIDTH = 100  # columns
VALUE_WIDTH = 44  # columns of "key = value"
INDENT = " " * 6


def settings_help(section: str | None = None, *, _root_: DictConfig) -> str:
    """Render the settings of a composition; the OmegaConf resolver behind `${settings_help:}` in `conf/config.yaml`.

    Hydra fills the result in a `string.Template`, hence the doubled dollar signs.
    """
    return render(_root_, section).replace("$", "$$")


def render(composed: DictConfig, section: str | None = None) -> str:
    """Render all settings, those of a section or one: its value in `composed`, accepted values and meaning."""
    lines: list[str] = []
    previous: type | None = None

    for each in settings(RunConfig):
        if section and each.key != section and not each.key.startswith(f"{section}."):
            continue

        if each.section is not previous:
            prefix = each.key.rpartition(".")[0] or "run"
            summary = (inspect.getdoc(each.section) or "").partition("\n")[0]
            lines += ["", f"{prefix}: {summary}"]
            previous = each.section
        lines += _entry(each, composed)

    return "\n".join(lines).strip("\n")


def _entry(setting: Setting, composed: DictConfig) -> Iterator[str]:
    """The lines of one setting: value and accepted values, then the meaning."""
    value = OmegaConf.select(composed, setting.key, default=setting.default)
    yield f"  {f'{setting.key} = {_shown(value)}':<{VALUE_WIDTH}}  {setting.accepted}"
    yield from textwrap.wrap(setting.help, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)


def _shown(value: object) -> str:
    """Render a value as the command line takes it.

    >>> [_shown(each) for each in (None, True, 0.5, "", "a b", {"x": 1})]
    ['null', 'true', '0.5', "''", 'a b', '{"x": 1}']
    """
    if isinstance(value, DictConfig | ListConfig):
        value = OmegaConf.to_container(value, resolve=True, enum_to_str=True)
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, str):
        return value or "''"
    return json.dumps(value, ensure_ascii=False)
