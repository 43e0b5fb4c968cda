"""Command-line arguments: their order, those in another program's style, and completion of settings with named values.

Hydra's parser would answer `--steps=5`, `--model x` and an option between two settings with its usage, a missing
bracket with its grammar, and its completion plugins offer `mode=Mode.train` alone.
"""

import re
import shlex
from collections import deque
from collections.abc import Sequence
from enum import Enum
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from app.config import foreign_names
from app.config.command_line import override
from app.config.run import SECTIONS, Mode, RunConfig
from app.config.setting import settings
from app.errors import ConfigError

# Hydra's options: those that stand alone, those with a value, and their short names.
FLAGS = ("--help", "--hydra-help", "--version", "--resolve", "--run", "--multirun", "--shell-completion")
VALUED = ("--cfg", "--package", "--config-path", "--config-name", "--config-dir", "--experimental-rerun", "--info")
OPTIONS = (*FLAGS, *VALUED)
SHORT = {
    "-h": "--help",
    "-r": "--run",
    "-m": "--multirun",
    "-sc": "--shell-completion",
    "-c": "--cfg",
    "-p": "--package",
    "-cp": "--config-path",
    "-cn": "--config-name",
    "-cd": "--config-dir",
    "-i": "--info",
}
OPTION_CHOICES = {
    "--cfg": ("job", "hydra", "all"),
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
}
GROUPS = ("algorithm", "data", "device", "environment", "experiment", "model", "placement", "reward", "tracking")
WITHOUT_PRESET = ("experiment", "sweep")  # groups of which nothing is chosen by default
FILES = (".csv", ".gz", ".json", ".jsonl", ".parquet")
PATHS = {"data": "data.path={}", "model": "model=hf model.path={}"}  # groups that a path or a hub id is often given to

BEYOND_ASCII = re.compile(r"""[^\s,:\[\]{}"']*[^\x00-\x7f][^\s,:\[\]{}"']*""")  # words


def check_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with the options of Hydra behind the settings: its parser refuses them in between.

    `--help` takes the name of a section or a setting, and then shows that alone.

    Raises:
        ConfigError: An argument is neither an option of Hydra nor `key=value`, or not written as Hydra reads it.

    >>> check_arguments(["steps=3", "--cfg", "job", "seed=1"])
    ['steps=3', 'seed=1', '--cfg', 'job']
    >>> check_arguments(["--help", "trainer"])
    ["hydra.help.template='${settings_help:trainer}'", '--help']
    >>> check_arguments(["--steps=5"])
    Traceback (most recent call last):
    app.errors.ConfigError: --steps=5 is not accepted: write steps=5.
    """
    overrides: list[str] = []
    options: list[str] = []
    with_help = any(word in ("--help", "-h") for word in arguments)
    names = [*SECTIONS, *(each.key for each in settings(RunConfig))]

    words = deque(arguments)
    while words:
        word = words.popleft()
        name, equals, _ = word.partition("=")
        name = SHORT.get(name, name)

        if with_help and word in names:
            overrides.append(f"hydra.help.template='${{settings_help:{word}}}'")
        elif not word.strip("-+~"):
            raise ConfigError(word or "an empty argument", "", reason="leave it out")
        elif name in VALUED:
            options += _with_value(name, word, words)
        elif name in FLAGS and not equals:
            options.append(name)
        elif word.startswith("-") or ("=" not in word and not word.startswith("~")):
            raise _not_an_override(word, words[0] if words else None)
        else:
            overrides.append(_checked_override(word))
    return [*overrides, *options]


def named_values(line: str) -> list[str]:
    """Return the completions of the last word of a command line that sets a setting with named values.

    >>> named_values("posttrain steps=3 mode=e")
    ['mode=eval', 'mode=export']
    """
    word = line.rpartition(" ")[2]
    key, equals, _ = word.partition("=")
    default = next((each.default for each in settings(RunConfig) if each.key == key), None)
    if not equals or not isinstance(default, Enum):
        return []
    return [choice for name in type(default).__members__ if (choice := f"{key}={name}").startswith(word)]


def _with_value(option: str, word: str, words: deque[str]) -> list[str]:
    """The option's name and its value, which is taken from the words that follow if it is not in this one."""
    choices = OPTION_CHOICES.get(option, ())
    _, equals, value = word.partition("=")
    if not equals and option == "--info" and (not words or words[0] not in choices):
        return [option]

    if not equals and words and not words[0].startswith("-"):
        value = words.popleft()
    if not value or (choices and value not in choices):
        raise ConfigError(f"{option} {value}".strip(), "", f"one of {', '.join(choices)}" if choices else "a value")
    return [option, value]


def _not_an_override(word: str, following: str | None) -> ConfigError:
    """Return the error of a word that is neither an option nor an override, with what to write instead."""
    if following is not None and (following.startswith("-") or "=" in following):
        following = None

    key, equals, value = word.lstrip("-").partition("=")
    if f"--{key}" in OPTIONS:
        behind = f" {following}" if following and f"--{key}" in VALUED else ""
        return ConfigError(word + behind, "", reason=f"write --{key}{behind}")

    if started := [option for option in OPTIONS if option.startswith(word)]:
        return ConfigError(word, "", f"one of {', '.join(started)}")

    if word in Mode.__members__ and (following is None or following in Mode.__members__):
        return ConfigError(word, "", reason=f"write mode={word}")

    if not equals and ":" in key:
        key, _, value = key.partition(":")
    if value:
        return ConfigError(word, "", reason=_answer(key, value))

    shown = word if following is None else f"{word} {following}"
    return ConfigError(shown, "", reason=_answer(key, following or foreign_names.VALUE))


def _answer(key: str, value: str) -> str:
    """What to write for a setting, which may be one that another program calls `key`."""
    names = {each.key for each in settings(RunConfig)}
    other = None if key in names else foreign_names.answer(key, value)
    return other or f"write {key}={value}"


def _checked_override(word: str) -> str:
    """Return an override, quoted where it is text that Hydra cannot read without: `data.answer_after=####`.

    Raises:
        ConfigError: Hydra cannot read it, or it deletes a setting of the schema.
    """
    key, _, value = word.lstrip("+~").partition("=")
    if not key:
        raise ConfigError(word, "", reason=f"write <key>={value}")

    declared = next((each for each in settings(RunConfig) if each.key == key), None)
    if word.startswith("~") and declared and not isinstance(declared.default, dict):
        raise ConfigError(word, "", reason=f"a setting cannot be deleted; write {key}=<value>")

    try:
        parsed = OverridesParser.create().parse_override(word)
    except HydraException as error:
        quoted = shlex.split(override(key, value))[0]
        if declared and declared.accepted.endswith("text") and _is_readable(quoted):
            return quoted
        # Hydra 1.3 reads letters beyond ASCII between quotes only, also where they are in a list
        worded = word.removesuffix(value) + BEYOND_ASCII.sub(r'"\g<0>"', value)
        if worded != word and (declared or "." in key) and _is_readable(worded):
            return worded
        raise _unreadable(word, str(error)) from None

    if key in (*GROUPS, "sweep") and not word.startswith("~") and not parsed.is_sweep_override():
        _check_choice(key, value, parsed.value())
    return word


def _check_choice(group: str, text: str, value: object) -> None:
    """Raise `ConfigError` if the choice of a group is no name of a preset. Hydra takes lists, and fails on the rest."""
    if isinstance(value, str):
        if group in PATHS and ("/" in text or (group == "data" and Path(text).suffix in FILES)):
            raise ConfigError(group, text, "the name of a preset", f"your own is {PATHS[group].format(text)}")
        return
    if isinstance(value, dict) and value:
        return  # settings of a section: Hydra's answer is condensed later

    if value is None and group in WITHOUT_PRESET:
        raise ConfigError(group, text, reason=f"leave it out: there is no {group} by default")
    if group == "tracking" and isinstance(value, list):
        raise ConfigError(group, text, reason=f"write tracking.use={text}")
    raise ConfigError(
        group, text, "the name of one preset", "add -m for a sweep over several" * isinstance(value, list)
    )


def _unreadable(word: str, problem: str) -> ConfigError:
    """Return the error of an override that Hydra cannot read, with how to write it; `problem` is Hydra's message."""
    if "while evaluating" in problem:  # a function: choice(1,2), range(1,3), int(x)
        return ConfigError(word, "", reason=problem.splitlines()[0])

    key, _, value = word.partition("=")
    if "\n" in word:
        return ConfigError(key, "…", reason=f"quote its lines for the shell and for Hydra, '{key}=\"…\"'")

    quoted = override(key, value)
    for text in (value.strip("=,"), *(value + closing for closing in "]})")):
        if _is_readable(f"{key}={text}"):
            quoted = shlex.quote(f"{key}={text}")
            break
    if not _is_readable(shlex.split(quoted)[0]):
        return ConfigError(word, "", reason=f"write key=value; {key} cannot be the name of a setting")
    return ConfigError(word, "", reason=f"write {quoted}")


def _is_readable(word: str) -> bool:
    try:
        OverridesParser.create().parse_override(word)
    except HydraException:
        return False
    return True
