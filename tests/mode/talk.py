"""An environment of whole runs, whose diary tells what became of each of its objects. Standard library only."""

import asyncio
import itertools
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

_numbers = itertools.count()
POLL_S = 0.02


class Talk:
    """Two to four turns; scores right replies. While `hold` exists in `folder`, first steps stay until `go` does."""

    def __init__(self, folder: str, fails_every: int = 0) -> None:
        self.folder = Path(folder)
        self.number = next(_numbers)
        self.name = f"{os.getpid()}-{self.number}"
        self.task: Any = None
        self._note("made")
        self.fails = fails_every and self.number % fails_every == fails_every - 1

    def begin(self, task) -> None:
        """The data set's own prompt."""
        self.task = task
        self.random = random.Random(f"{task.id}/{self.number}")
        self.turns = self.random.randint(2, 4)
        self.said = self.right = 0
        self._note("begin")

    async def step(self, reply):
        """Ask for another sum, after which the question of the task is right again only by accident."""
        self.said += 1
        self.right += reply.text.strip() == self.task.answer
        if self.said == 1 and (self.folder / "hold").exists():
            self._note("held")
            while not (self.folder / "go").exists():  # noqa: ASYNC110 (a file of another process)
                await asyncio.sleep(POLL_S)
        if self.fails and self.task.training and self.said == 2:
            raise RuntimeError("failed on purpose")
        if self.said == self.turns:
            return None
        return f"{self.random.randrange(10, 50)}+{self.random.randrange(10, 50)}="

    def score(self):
        return self.right / self.turns

    def close(self) -> None:
        self._note("close")

    def _note(self, what: str) -> None:
        with (self.folder / "diary").open("a") as diary:
            diary.write(f"{what} {self.name} {self.task.id if self.task else '-'}\n")


class Diary:
    """What all objects wrote."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "diary"

    def lines(self, what: str) -> list[tuple[str, str]]:
        """Object and task of each such line."""
        lines = [line.split() for line in self.path.read_text().splitlines()] if self.path.exists() else []
        return [(name, task) for kind, name, task in lines if kind == what]

    def assert_closed_once(self) -> None:
        """Each object that was made was closed once."""
        made, closed = (Counter(name for name, _ in self.lines(what)) for what in ("made", "close"))
        assert set(made.values()) == {1}
        assert closed == made

    def begun(self) -> Counter[str]:
        """Objects by task."""
        return Counter(task for _, task in self.lines("begin"))
