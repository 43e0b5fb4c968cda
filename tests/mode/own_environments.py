"""Environments of tests, which a worker imports from the working directory."""

import os
import time
from pathlib import Path
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


class NeverBegins(Guess):
    def begin(self, task: Any) -> None:
        raise RuntimeError("the sandbox cannot be reached")


class Raises(Guess):
    def step(self, reply: Any) -> str | None:
        raise KeyError("board")


class Dies(Guess):
    def step(self, reply: Any) -> str | None:
        os._exit(3)


class Hangs(Guess):
    def step(self, reply: Any) -> str | None:
        time.sleep(1000)
        return None


class Speaks(Guess):
    """Never ends by itself."""

    def step(self, reply: Any) -> str | None:
        return "again"


class Hour:
    """A plain step stays for an hour. Leaves a file when it does, and one when the environment is closed."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def begin(self, task: Any) -> None:
        """The data set's own prompt."""

    def step(self, reply: Any) -> None:
        (self.folder / "stays").touch()
        time.sleep(3600)

    def score(self) -> float:
        return 0.0

    def close(self) -> None:
        (self.folder / "closed").touch()
