"""Checks arguments that Hydra would reject with its usage or grammar."""

import re
import shlex
from argparse import Action
from collections import deque
from collections.abc import Sequence

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from app.config import foreign_names
from app.config.command_line import override
from app.config.run import SECTIONS, Mode, RunConfig
from app.config.setting import settings
from app.errors import ConfigError, expect

OPTIONS = {name: action for action in get_args_parser()._actions for name in action.option_strings}
SETTINGS = {each.key: each for each in settings(RunConfig)}
GROUPS = "algorithm data device environment experiment model placement reward tracking sweep".split()  # noqa: SIM905
BEYOND_ASCII = re.compile(r"""[^\s,:\[\]{}"']*[^\x00-\x7f][^\s,:\[\]{}"']*""")  # words


def check_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with the options of Hydra behind the settings: its parser refuses them in between.

    `--help` takes the name of a section or a setting, and then shows that alone.

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

    words = deque(arguments)
    while words:
        word = words.popleft()
        name, equals, value = word.partition("=")
        option = OPTIONS.get(name)
        if with_help and word in (*SECTIONS, *SETTINGS):
            overrides.append(f"hydra.help.template='${{settings_help:{word}}}'")
        elif option is not None and (option.nargs != 0 or not equals):
            options += _with_value(option, word, value, words)
        elif word.startswith("-") or ("=" not in word and not word.startswith("~")):
            raise ConfigError(word, "", reason=_instead(word, words[0] if words else ""))
        else:
            overrides.append(_readable(word))
    return [*overrides, *options]


def _with_value(option: Action, word: str, value: str, words: deque[str]) -> list[str]:
    """Return an option's name and its value, taken from the words that follow if there is none in this one."""
    choices = [str(each) for each in option.choices or ()]
    optional = option.nargs is not None
    follows = bool(words) and not words[0].startswith("-") and (not optional or words[0] in choices)
    value = value or (words.popleft() if follows else "")
    good = (value in choices or not choices) if value else optional and (option.nargs == "?" or not choices)
    expect(good, word, "", f"one of {', '.join(choices)}" if choices else "a value")
    return [option.option_strings[0], *filter(None, [value])]


def _instead(word: str, following: str) -> str:
    """Return what to write in place of a word that is neither an option nor an override."""
    if word in Mode.__members__:
        return f"write mode={word}"
    key, _, value = word.lstrip("-").replace(":", "=").partition("=")
    if f"--{key}" in OPTIONS:
        return f"write --{key}"
    if not value and following and not following.startswith("-") and "=" not in following:
        value = following
    value = value or foreign_names.VALUE
    return (None if key in SETTINGS else foreign_names.answer(key, value)) or f"write {key}={value}"


def _readable(word: str) -> str:
    """Return an override, quoted where Hydra needs it, as in `data.answer_after=####`."""
    key, _, value = word.lstrip("+~").partition("=")
    declared = SETTINGS.get(key)
    if word.startswith("~") and declared and not isinstance(declared.default, dict):
        raise ConfigError(word, "", reason=f"a setting cannot be deleted; write {key}=<value>")

    quoted = shlex.split(override(key, value))[0]
    # Hydra 1.3 reads letters beyond ASCII between quotes only, also where they are in a list
    worded = word.removesuffix(value) + BEYOND_ASCII.sub(r'"\g<0>"', value)
    candidates = [word, quoted] if declared and declared.accepted.endswith("text") else [word]
    if worded != word and (declared or "." in key):
        candidates.append(worded)
    problem = ""
    for candidate in candidates:
        try:
            parsed = OverridesParser.create().parse_override(candidate)
        except HydraException as error:
            problem = problem or str(error).splitlines()[0]
            continue

        # Hydra composes all presets of a list, one over the other.
        several = key in GROUPS and isinstance(parsed.value(), list) and not parsed.is_sweep_override()
        expect(not several, key, value, "one preset, or add -m for a sweep of several, without brackets")
        return candidate
    reason = f"{problem}; quote text for the shell and for Hydra"
    raise ConfigError(key or word, value.replace("\n", " "), reason=reason)
