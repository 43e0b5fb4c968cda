"""Command lines in messages, to be copied: named as typed, quoted where Hydra or the shell needs it."""

import re
import shlex
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from hydra.core.hydra_config import HydraConfig

DISTRIBUTION = "hydra-posttrain"
CONSOLE_SCRIPT = "posttrain"


def override(key: str, value: object) -> str:
    """Return `key=value` as a word of a shell's command line.

    >>> print(override("resume", "runs/mine"), override("resume", "my runs/a=b"))
    resume=runs/mine 'resume="my runs/a=b"'
    """
    text = str(value)
    if not re.fullmatch(r"[\w/.+-]+", text, re.ASCII):  # Hydra 1.3 reads no other letter without quotes
        text = '"' + text.replace('"', r"\"") + '"'
    return shlex.quote(f"{key}={text}")


def command(*overrides: str) -> str:
    """Return the command line with these overrides, each from `override`."""
    return " ".join((command_name(), *overrides))


def command_name() -> str:
    """Return the command as it was typed; the OmegaConf resolver behind `${command_name:}` in `conf/config.yaml`."""
    return CONSOLE_SCRIPT if Path(sys.argv[0]).name == CONSOLE_SCRIPT else "python -m app"


def given_settings() -> list[str]:
    """Return the names of the settings on the command line of this process; none where Hydra has read none."""
    if not HydraConfig.initialized():
        return []
    return names_of(HydraConfig.get().overrides.task)


def names_of(overrides: Iterable[object]) -> list[str]:
    """Return the settings and groups that overrides are of."""
    return [str(each).lstrip("+~").partition("=")[0] for each in overrides]


def versions() -> str:
    """Return the versions of the application and of Hydra; the answer to `--version`."""
    try:
        own = version(DISTRIBUTION)
    except PackageNotFoundError:
        own = "(not installed)"
    return f"{DISTRIBUTION} {own}, Hydra {version('hydra-core')}"
