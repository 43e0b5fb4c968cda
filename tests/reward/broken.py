"""Rewards that fail, and two that work."""

import time


def raises(trajectories) -> None:
    raise KeyError("score")


def hangs(trajectories) -> None:
    time.sleep(1000)


def works(trajectories):
    return [1.0] * len(trajectories)


def reads_messages(trajectories):
    assert all(each.prompt.messages[-1]["content"] == each.prompt.question for each in trajectories)
    return [float(len(each.prompt.messages)) for each in trajectories]
