"""Calls of Ray actors: await a reference, and turn Ray's errors into those that end a run."""

import re
from typing import Any

from ray.exceptions import RayActorError, RayTaskError

from app.errors import RunError, one_line

FACT = re.compile(r"(class_name|actor_id|pid|name|namespace|ip|repr): (.*)")
NODE_ID = re.compile(r"\.? Node Id: \w+")  # the address says more
GUESSES = re.compile(r"\.? (There are some potential root causes|Some common causes include).*")


async def reply(reference: Any) -> Any:
    """Await a Ray reference as a coroutine, which is what `asyncio` makes tasks of."""
    return await reference


def run_error(
    error: BaseException, who: str, call: str, *, failed: type[RunError], lost: type[RunError]
) -> BaseException:
    """Convert the error of an actor's call.

    Args:
        error: What awaiting the reference raised.
        who: The actor, for the sentence.
        call: What it was called for.
        failed: The type for an exception of the call, which becomes its cause.
        lost: The type for an actor that died.

    Returns:
        A `RunError` of the actor itself as it is; `lost` or `failed` otherwise.
    """
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, RunError):
        return cause

    if isinstance(error, RayActorError):
        converted = lost(f"{who} died during {call}: {cause_of_death(error)}")
    else:
        converted = failed(f"{who} failed during {call}: {type(cause).__name__}: {one_line(cause)}")
    converted.__cause__ = error
    return converted


def cause_of_death(error: BaseException) -> str:
    r"""Return one line of a `RayActorError`: the cause, and the address of the actor's node where Ray tells it.

    Ray's text about an actor that could not be built is a traceback, whose last line names the exception. Its text
    about any other actor begins with a general sentence and facts, such as the node's `ip`; the cause follows.

    >>> cause_of_death(RuntimeError("The actor died.\n\tip: 10.0.0.2\nIts node has died. Node Id: 5f\n\tno heartbeats"))
    'Its node has died: no heartbeats (on 10.0.0.2)'
    """
    if getattr(error, "actor_init_failed", False):
        return str(error).strip().splitlines()[-1]

    lines = [line.strip() for line in str(error).strip().splitlines()]
    facts = {match[1]: match[2] for match in map(FACT.fullmatch, lines) if match}
    if "ip" not in facts:
        return one_line(error)

    texts = [GUESSES.sub("", NODE_ID.sub("", line)) for line in lines if not FACT.fullmatch(line)]
    return f"{': '.join(texts[1:3] or texts)} (on {facts['ip']})"
