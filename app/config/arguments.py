"""Command-line arguments: those in another program's style, and the completion of settings with named values.

Hydra's parser would answer `--steps=5`, `--model x` and `steps 5` with its usage, or with the position of a missing
equals sign, and its completion plugins offer `mode=Mode.train` alone.
"""

from collections.abc import Sequence
from enum import Enum

from hydra._internal.utils import get_args_parser

from app.config.run import RunConfig
from app.config.setting import settings
from app.errors import ConfigError


def check_arguments(arguments: Sequence[str]) -> None:
    """Raise `ConfigError` for the first argument that is neither an option of Hydra nor `key=value`.

    >>> check_arguments(["--steps=5"])
    Traceback (most recent call last):
    app.errors.ConfigError: --steps=5 is not accepted: write steps=5.
    """
    parser = get_args_parser()
    options = parser._option_string_actions
    takes_value = {name for name, action in options.items() if action.nargs != 0}

    words = iter(enumerate(arguments))
    for index, word in words:
        following = arguments[index + 1] if index + 1 < len(arguments) else None

        if word in takes_value:
            next(words, None)
        elif word.startswith("-"):
            if not _is_option(word, list(options)):
                raise ConfigError(_advice(word, following))
        elif "=" not in word and not word.startswith("~"):
            raise ConfigError(_advice(word, following))


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


def _is_option(word: str, options: Sequence[str]) -> bool:
    """Whether argparse takes this word as an option: `--multirun`, a beginning of it, `--cfg=job`, `-cjob`."""
    name = word.partition("=")[0]
    if word.startswith("--"):
        return any(option.startswith(name) for option in options)
    return name in options or (len(word) > 2 and word[:2] in options and "=" not in word)


def _advice(word: str, following: str | None) -> str:
    key, equals, value = word.lstrip("-").partition("=")
    if equals:
        return f"{word} is not accepted: write {key}={value}."

    if following is None or following.startswith("-") or "=" in following:
        return f"{word} is not accepted: write {key}=<value>."

    return f"{word} {following} is not accepted: write {key}={following}."
