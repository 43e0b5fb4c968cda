"""Environments of tests, which a worker imports from the working directory."""

from typing import Any


class Guess:
    """The secret is the answer of the row; hints lead to it."""

    def __init__(self, hint: str = "wrong") -> None:
        self.hint = hint

    def begin(self, task: Any) -> None:
        self.secret = task.answer
        self.found = False

    def step(self, reply: Any) -> str | None:
        self.found = reply.text == self.secret
        return None if self.found else self.hint

    def score(self) -> dict[str, float]:
        return {"found": float(self.found), "polite": 0.5}


class Unscored:
    """Another reward judges the last reply."""

    def begin(self, task: Any) -> None:
        pass

    def step(self, reply: Any) -> None:
        pass
