"""Reads why a Ray actor died, from Ray's error."""

from app.errors import one_line


def cause_of_death(error: BaseException) -> str:
    """Return one line of a `RayActorError`: the exception of an actor that could not be built, else Ray's first line.

    Ray's text about an actor that could not be built is a traceback, whose last line names the exception.
    """
    if getattr(error, "actor_init_failed", False):
        return str(error).strip().splitlines()[-1]
    return one_line(error)
