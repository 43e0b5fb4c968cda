"""The errors that end a run with one sentence. Anything else that escapes is a bug and keeps its traceback."""

from hydra.errors import CompactHydraException


class ConfigError(CompactHydraException):
    """The configuration cannot be run: names the key, the value and what is accepted. Exit code 2."""


class RunError(Exception):
    """A run failed: says which part, while doing what, and where its log is. Exit code 1."""


class Interrupted(RunError):
    """The run was asked to stop (Ctrl-C, SIGTERM)."""


class EngineError(RunError):
    """An engine died, stalled or refused a call."""


class EngineLost(EngineError):
    """An engine died or stalled: nothing that it was asked for will come."""


class TrainerError(RunError):
    """A trainer rank died, stalled or failed."""


class TrainerLost(TrainerError):
    """The trainer's ranks cannot go on: one is gone, or the parameters are in the middle of a step's updates."""


class CheckpointError(RunError):
    """A checkpoint could not be written or read, or is not one of this model: names its folder."""


class SyncError(RunError):
    """A push failed: names engine, rank, bucket and phase."""


def expect(condition: bool, key: str, value: object, accepted: str) -> None:
    """Raise the one sentence that every wrong value gets.

    >>> expect(False, "steps", 0, "a whole number of at least 1")
    Traceback (most recent call last):
    app.errors.ConfigError: steps=0 is not accepted: give a whole number of at least 1.
    """
    if not condition:
        shown = "null" if value is None else str(getattr(value, "name", value))
        raise ConfigError(f"{key}={shown} is not accepted: give {accepted}.")


def one_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type's name when it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
