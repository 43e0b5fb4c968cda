r"""`environment=calculator`: a policy may ask before it answers. The tool of the tiny model, as plain text.

    37*84=  │  ?37*84 <eos>  │  3108\n  │  3108 <eos>
    prompt     asks             read       answers

A reply that begins with `?` asks for one operation on two whole numbers. Its result is the next observation: one line.
Any other reply is the answer and ends the episode; `reward=exact` judges it.

Invariants:
- A malformed request is not a failure: the next observation is a line that says what is wrong.
- Nothing is evaluated as Python; numbers have at most `MAX_DIGITS` digits.
"""

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from app.environment.protocol import EpisodeOver, Policy, Task

ASK = "?"
MAX_DIGITS = 18
ERROR = "error: ask a*b, a+b or a-b\n"
OPERATIONS: Mapping[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
NUMBER = rf"(-?[0-9]{{1,{MAX_DIGITS}}})"
QUESTION = re.compile(rf"\s*{NUMBER}\s*([-+*])\s*{NUMBER}\s*")


class Calculator:
    """Answers questions until the policy gives an answer of its own."""

    async def run(self, task: Task, policy: Policy) -> None:
        """Play the episode. It has no score of its own."""
        try:
            reply = await policy(None)
            conversation = []
            while reply.text.startswith(ASK):
                observation = answer(reply.text.removeprefix(ASK))
                policy.count("tool_calls")
                policy.count("tool_failures", float(observation == ERROR))

                conversation += [reply.message, {"role": "user", "content": observation}]
                reply = await policy(conversation)
        except EpisodeOver:
            pass  # the last reply was a question; the policy has noted which limit it was


def answer(question: str) -> str:
    r"""Return the calculator's one-line reply to a question.

    >>> answer("37*84")
    '3108\n'
    >>> answer("37*84+1")
    'error: ask a*b, a+b or a-b\n'
    """
    match = QUESTION.fullmatch(question)
    if match is None:
        return ERROR

    left, sign, right = match.groups()
    return f"{OPERATIONS[sign](int(left), int(right))}\n"


def make(settings: Mapping[str, Any]) -> Callable[[], Calculator]:
    """Return the function that makes a new environment for each episode. There are no settings."""
    return Calculator
