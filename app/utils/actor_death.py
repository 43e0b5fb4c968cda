"""Reads why a Ray actor died, and where, from Ray's error."""

import re

from app.errors import one_line

FACT = re.compile(r"(class_name|actor_id|pid|name|namespace|ip|repr): (.*)")
NODE_ID = re.compile(r"\.? Node Id: \w+")  # the address says more
GUESSES = re.compile(r"\.? (There are some potential root causes|Some common causes include).*")


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
