"""Rewards that fail, and some that work, for tests that name one by its path."""

import asyncio
import os
import sys
import time
from pathlib import Path


def raises(trajectories) -> None:
    raise KeyError("score")


def hangs(trajectories) -> None:
    time.sleep(1000)


def dies(trajectories) -> None:
    os._exit(3)


def touchy(trajectories):
    """Fail as a completion says."""
    failures = {"raise": raises, "hang": hangs, "die": dies}
    for each in trajectories:
        if each.text in failures:
            failures[each.text](trajectories)
    return [float("nan") if each.text == "nan" else 1.0 for each in trajectories]


def killed_once(trajectory):
    """Kill the worker, unless the file that the completion names is there."""
    mark = Path(trajectory.text)
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), 9)
    return 1.0


def works(trajectories):
    return [1.0] * len(trajectories)


def right(trajectories):
    return [float(each.text == each.prompt.answer) for each in trajectories]


def sees(trajectories, seen):
    with open(seen, "a") as file:
        for each in trajectories:
            print(each.prompt.row["level"], each.text, each.completion.token_ids.tolist(), sep="|", file=file)
    return right(trajectories)


def brief(trajectories, limit):
    return [float(len(each.text) <= limit) for each in trajectories]


async def polite(trajectory):
    return float("please" in trajectory.text)


def of_code(completions, kind):
    return [1.0 if each == "code" else None for each in kind]


def ranked(trajectories, weights):
    assert len({each.prompt.id for each in trajectories}) == 1
    return [weights[2][0] * index for index in range(len(trajectories))]


def slow(trajectories, calls):
    with open(calls, "a") as file:
        file.write(f"{len(trajectories)} ")
    time.sleep(0.8)
    return right(trajectories)


class Judge:
    """Judges the completions of a call together: one after another, they would wait for ever."""

    def __init__(self, size: int) -> None:
        self.size, self.arrived, self.all = size, 0, asyncio.Event()
        self.loops: set[int] = set()

    async def __call__(self, trajectory):
        self.arrived += 1
        self.loops.add(id(asyncio.get_running_loop()))
        if self.arrived == self.size:
            self.all.set()
        await self.all.wait()

        print(f"judged {trajectory.text}", flush=True)  # noqa: T201  to the log
        if trajectory.text == "bad":
            raise ConnectionError("refused")
        heavy = sum(name in sys.modules for name in ("torch", "hydra", "omegaconf", "ray", "transformers"))
        return {"score": 0.5, "arrived": self.arrived, "loops": len(self.loops), "heavy": heavy}


def undecided(trajectories):
    return [None for _ in trajectories]
