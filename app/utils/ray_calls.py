"""Calls of Ray actors: await a reference, and turn Ray's errors into those that end a run."""

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from ray.exceptions import ActorUnschedulableError, RayActorError, RayTaskError

from app.errors import RunError, one_line

# Ray has the cause of an actor's death in the text of its error alone, below general sentences and facts.
FACT = re.compile(r"(class_name|actor_id|pid|name|namespace|ip|repr): (.*)")
NODE_ID = re.compile(r"\.? Node Id: \w+")  # the address says more
GUESSES = re.compile(r"\.? (There are some potential root causes|Some common causes include).*")


def keep_ray_logs(logs: Path, failure: type[BaseException] | None, *_: object) -> None:
    """At a failure copy what this run's own Ray logged to `ray/` in `logs`: it goes with the run's temporary files."""
    if failure is not None and issubclass(failure, Exception) and _ray_logs().is_dir():
        with suppress(OSError):  # a full disk must not hide the failure
            shutil.copytree(_ray_logs(), logs / "ray", dirs_exist_ok=True)


def last_ray_error() -> str:
    """Return the last error in Ray's own log, as the end of a sentence; empty without one."""
    errors = _ray_logs() / "raylet.err"
    text = errors.read_text(encoding="utf-8", errors="replace").strip() if errors.is_file() else ""
    return f"; the last line of logs/ray/{errors.name}: {text.splitlines()[-1]}" if text else ""


def _ray_logs() -> Path:
    return Path(os.environ.get("RAY_TMPDIR", ""), "ray", "session_latest", "logs")


async def reply(reference: Any) -> Any:
    """Await a Ray reference as a coroutine, which is what `asyncio` makes tasks of."""
    return await reference


def run_error(
    error: BaseException, who: str, call: str, *, failed: type[RunError], lost: type[RunError]
) -> BaseException:
    """Convert the error of a call: `lost` if the actor died, a `RunError` of its own as it is, else `failed`."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, RunError):
        return cause

    if isinstance(error, RayActorError):
        converted = lost(f"{who} died during {call}: {cause_of_death(error)}")
    else:
        words = last_ray_error() if isinstance(cause, ActorUnschedulableError) else ""  # whose process did not start
        converted = failed(f"{who} failed during {call}: {type(cause).__name__}: {one_line(cause)}{words}")
    converted.__cause__ = error
    return converted


def cause_of_death(error: BaseException) -> str:
    r"""Return one line of a `RayActorError`: the cause, and the address of the actor's node if Ray knows it.

    The text about an actor that could not be built is a traceback, whose last line names the exception.

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
