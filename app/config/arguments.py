"""Command-line arguments: their order, those in another program's style, and completion of settings with named values.

Hydra's parser would answer `--steps=5`, `--model x` and an option between two settings with its usage, a missing
bracket with its grammar, and its completion plugins offer `mode=Mode.train` alone.
"""

import shlex
from argparse import Action
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from app.config import foreign_names
from app.config.command_line import override
from app.config.run import SECTIONS, Mode, RunConfig
from app.config.setting import settings
from app.errors import ConfigError

CLOSING = {"[": "]", "{": "}", "(": ")"}
GROUPS = ("algorithm", "data", "device", "environment", "experiment", "model", "placement", "reward", "tracking")
WITHOUT_PRESET = ("experiment", "sweep")  # groups of which nothing is chosen by default
FILES = (".csv", ".gz", ".json", ".jsonl", ".parquet")
PATHS = {"data": "data.path={}", "model": "model=hf model.path={}"}  # groups that a path or a hub id is often given to


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
    known = get_args_parser()._option_string_actions
    overrides: list[str] = []
    options: list[str] = []
    with_help = any(word in ("--help", "-h") for word in arguments)
    names = [*SECTIONS, *(each.key for each in settings(RunConfig))]

    words = deque(arguments)
    while words:
        word = words.popleft()
        if with_help and word in names:
            overrides.append(f"hydra.help.template='${{settings_help:{word}}}'")
            continue

        if not word.strip("-+~"):
            raise ConfigError(word or "an empty argument", "", reason="leave it out")

        option = _option(word, known)
        if option is not None:
            options += _with_value(word, option, words)
        elif word.startswith("-") or ("=" not in word and not word.startswith("~")):
            raise _not_an_override(word, words[0] if words else None, known)
        else:
            _check_override(word)
            overrides.append(word)
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


def _option(word: str, known: Mapping[str, Action]) -> Action | None:
    """The option that this word is: `--multirun`, an unambiguous beginning of it, `--cfg=job`, `-cjob`."""
    name = word.partition("=")[0]
    if name in known:
        return known[name]

    if word.startswith("--"):
        found = [each for each in known if each.startswith(name)]
        if len(found) > 1:
            raise ConfigError(word, "", f"one of {', '.join(found)}")
        return known[found[0]] if found else None

    attached = known.get(word[:2])
    return attached if attached and word[2:] in (attached.choices or ()) else None


def _with_value(word: str, option: Action, words: deque[str]) -> list[str]:
    """The option's name and its value, which is taken from the words that follow if it is not in this one."""
    name = option.option_strings[0]
    _, equals, value = word.partition("=")
    if option.nargs == 0:
        if equals:
            raise ConfigError(word, "", reason=f"write {name}")
        return [name]

    choices = [str(choice) for choice in option.choices or ()]
    accepted = f"one of {', '.join(choices)}" if choices else "a value"

    if word[2:] in choices:  # -cjob
        value = word[2:]
    elif not equals and option.nargs == "?":
        return [name, words.popleft()] if words and words[0] in choices else [name]
    elif not equals:
        if not words or words[0].startswith("-"):
            raise ConfigError(word, "", f"it {accepted}")
        value = words.popleft()

    if choices and value not in choices:
        raise ConfigError(f"{name} {value}", "", accepted)
    return [name, value]


def _not_an_override(word: str, following: str | None, known: Mapping[str, Action]) -> ConfigError:
    """Return the error of a word that is neither an option nor an override, with what to write instead."""
    if following is not None and (following.startswith("-") or "=" in following):
        following = None

    bare = word.lstrip("-")
    if f"--{bare}" in known:
        option = known[f"--{bare}"]
        value = following if option.nargs != 0 else None
        shown, written = (f"{each} {value}" if value else each for each in (word, f"--{bare}"))
        return ConfigError(shown, "", reason=f"write {written}")

    if word in Mode.__members__ and (following is None or following in Mode.__members__):
        return ConfigError(word, "", reason=f"write mode={word}")

    key, equals, value = bare.partition("=")
    if not equals and ":" in key:
        key, equals, value = key.partition(":")
    if equals and value:
        return ConfigError(word, "", reason=_answer(key, value))

    if following is None:
        return ConfigError(word, "", reason=_answer(key))

    return ConfigError(f"{word} {following}", "", reason=_answer(key, following))


def _answer(key: str, value: str = foreign_names.VALUE) -> str:
    """What to write for a setting, which may be one that another program calls `key`."""
    names = {each.key for each in settings(RunConfig)}
    other = None if key in names else foreign_names.answer(key, value)
    return other or f"write {key}={value}"


def _check_override(word: str) -> None:
    """Raise `ConfigError` for an override that Hydra cannot read, or that deletes a setting of the schema."""
    key, _, value = word.lstrip("+~").partition("=")
    if not key:
        raise ConfigError(word, "", reason=f"write <key>={value}")

    plain = [each.key for each in settings(RunConfig) if not isinstance(each.default, dict)]
    if word.startswith("~") and key in plain:
        raise ConfigError(word, "", reason=f"a setting cannot be deleted; write {key}=<value>")

    try:
        parsed = OverridesParser.create().parse_override(word)
    except HydraException as error:
        raise _unreadable(word, str(error)) from None
    if key in (*GROUPS, "sweep") and not word.startswith("~") and not parsed.is_sweep_override():
        _check_choice(key, value, parsed.value())


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

    for text in _corrections(value):
        if _is_readable(f"{key}={text}"):
            return ConfigError(word, "", reason=f"write {shlex.quote(f'{key}={text}')}")

    quoted = override(key, value)
    if _is_readable(shlex.split(quoted)[0]):
        return ConfigError(word, "", reason=f"write {quoted}")
    return ConfigError(word, "", reason=f"write key=value; {key} cannot be the name of a setting")


def _corrections(value: str) -> Iterator[str]:
    """Values that may have been meant, without a second equals sign or a last comma, or with their last brackets."""
    if value.startswith("="):
        yield value.lstrip("=")
    if value.endswith(","):
        yield value.rstrip(",")

    open_brackets: list[str] = []
    for character in value:
        if character in CLOSING:
            open_brackets.append(CLOSING[character])
        elif open_brackets and character == open_brackets[-1]:
            open_brackets.pop()
    if open_brackets:
        yield value + "".join(reversed(open_brackets))


def _is_readable(word: str) -> bool:
    try:
        OverridesParser.create().parse_override(word)
    except HydraException:
        return False
    return True
