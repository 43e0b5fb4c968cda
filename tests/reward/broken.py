"""Rewards that fail."""

import time


def raises(trajectories):
    raise KeyError("score")


def hangs(trajectories):
    time.sleep(1000)
