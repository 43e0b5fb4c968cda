"""The errors that end a run with one sentence, and the process's exit codes. Any other exception is a bug.

| exit code | meaning                                       |
|-----------|-----------------------------------------------|
| 0         | finished                                      |
| 1         | the run failed (`RunError`), or a check did   |
| 2         | the configuration is invalid (`ConfigError`)  |
| 130       | interrupted by SIGINT or SIGTERM              |
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import Enum
from typing import Any

from hydra.errors import CompactHydraException

FAILED_EXIT = 1
CONFIG_EXIT = 2
INTERRUPTED_EXIT = 130


class ConfigError(CompactHydraException):
    """A setting is not accepted.

    Its sentence is `<key>=<value> is not accepted: give <accepted>; <reason>.`, without the parts that are empty.

    Attributes:
        key: The setting, or the words of the command line. Empty for a sentence of another program, the `reason`.
        value: As on the command line.
        accepted: What to give.
        reason: Why, or what to do in other words than "give".

    >>> error = ConfigError("rollout.port", 30000, "a free port", "30000 is in use")
    >>> error.key, error.value, str(error)
    ('rollout.port', '30000', 'rollout.port=30000 is not accepted: give a free port; 30000 is in use.')
    """

    def __init__(self, key: str, value: object, accepted: str = "", reason: str = "") -> None:
        self.key = key
        self.value = yaml_text(value)
        self.accepted = accepted
        self.reason = reason
        super().__init__(key, self.value, accepted, reason)  # what pickle gives to the copy

    def __str__(self) -> str:
        setting = f"{self.key}={self.value}" if self.value else self.key
        advice = "; ".join(filter(None, (self.accepted and f"give {self.accepted}", self.reason)))
        sentence = f"{setting} is not accepted: {advice}" if self.key else advice
        return sentence if sentence.endswith((".", "?")) else f"{sentence}."


class RunError(Exception):
    """A run failed. Names the component, its phase and its log."""


class Interrupted(RunError):
    """The run was interrupted by Ctrl-C or SIGTERM."""


class EngineError(RunError):
    """An engine died, stalled or refused a call."""


class EngineLost(EngineError):
    """An engine died or stalled; all its in-flight requests are lost."""


class TrainerError(RunError):
    """A trainer rank died, stalled or failed. The ranks have to be started again."""


class CheckpointError(RunError):
    """A checkpoint could not be written or read, or belongs to another model. Names its folder."""


class DamagedCheckpoint(CheckpointError):
    """A file of a checkpoint is missing, incomplete or changed. An older checkpoint may be intact."""


class SyncError(RunError):
    """A weight sync failed. Names engine, rank, bucket and phase."""


def expect(condition: bool, key: str, value: object, accepted: str) -> None:
    """Raise the `ConfigError` of an invalid value unless `condition` holds.

    >>> expect(False, "steps", 0, "a whole number of at least 1")
    Traceback (most recent call last):
    app.errors.ConfigError: steps=0 is not accepted: give a whole number of at least 1.
    """
    if not condition:
        raise ConfigError(key, value, accepted)


@contextmanager
def named(key: str) -> Iterator[None]:
    """Raise a `ConfigError` of the block as one of the setting `key`, which shares the check of another one."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(key, error.value, error.accepted, error.reason) from error.__cause__


def yaml_text(value: Any) -> str:
    """Return a value as it is written on the command line and in a YAML file.

    >>> yaml_text({"strict": True, "limits": [None, 0.5]})
    '{strict: true, limits: [null, 0.5]}'
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {yaml_text(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(yaml_text, value)) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return value.name if isinstance(value, Enum) else str(value)


def one_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type's name when it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def exit_code(error: Exception) -> int:
    """Return the exit code of a run that this error ended."""
    if isinstance(error, Interrupted):
        return INTERRUPTED_EXIT
    return FAILED_EXIT if isinstance(error, RunError) else CONFIG_EXIT


def echo(message: Exception | str) -> None:
    """Write one line to stderr."""
    with suppress(BrokenPipeError):  # `2>&1 | head`: the exit code still says it
        sys.stderr.write(f"{message}\n")
