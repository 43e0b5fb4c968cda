"""Runs in a reward worker: loads one component and scores the trajectories of one call after another.

The main thread calls the reward, since some limit themselves with signals. What the driver sends is pickled inside the
message, since trajectories hold arrays; nothing that a worker sends is unpickled.
"""

import asyncio
import base64
import pickle
import resource
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.reward.component import Failure, FailureKind, LoggedScore, RewardComponent, RewardFunction, evaluate, failures
from app.types import Trajectory
from app.worker.wire import Codec

MAX_BUILT_IN_MEMORY = 4 << 30  # bytes of address space of a built-in: 9^{9^{9^9}} must not exhaust the machine


@dataclass(frozen=True, slots=True)
class Scored:
    """The packed outcome of a call."""

    job: int
    outcome: Any


CODEC = Codec(Scored)


def load(settings: Mapping[str, Any]) -> "RewardHandler":
    """Load the component. Raises `LoadError`."""
    component: RewardComponent = unpickled(settings["component"])
    reward = component.load()
    if component.key is None:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = MAX_BUILT_IN_MEMORY if hard == resource.RLIM_INFINITY else min(MAX_BUILT_IN_MEMORY, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    return RewardHandler(component, reward)


class RewardHandler:
    """Scores trajectories with a component."""

    def __init__(self, component: RewardComponent, reward: RewardFunction) -> None:
        self.info: Mapping[str, Any] = {}
        self._component = component
        self._reward = reward

    def serve(self, pipe: socket.socket) -> None:
        """Answer one call after another until the driver closes the pipe.

        The failures of a call, each kind of message once, go to stderr, which is the log.
        """
        with asyncio.Runner() as runner:
            for line in pipe.makefile("rb"):
                begin = CODEC.decode(line)
                trajectories = unpickled(begin.payload)
                outcome = evaluate(self._reward, trajectories, runner)
                prompts = ", ".join(dict.fromkeys(trajectory.prompt.id for trajectory in trajectories))
                where = f"{self._component.name} failed on {prompts}, {len(trajectories)} trajectories"
                for failure in dict.fromkeys(failures(outcome)):
                    sys.stderr.write(f"{where}: {failure}\n")
                pipe.sendall(CODEC.encode(Scored(begin.job, pack(outcome))))


def pickled(value: RewardComponent | Sequence[Trajectory]) -> str:
    """Return what the driver sends, as JSON text."""
    return base64.b64encode(pickle.dumps(value, pickle.HIGHEST_PROTOCOL)).decode()


def unpickled(text: str) -> Any:
    """Inverse of `pickled`."""
    return pickle.loads(base64.b64decode(text))


def pack(outcome: Any) -> Any:
    """Return an outcome, or a value of one, as JSON values."""
    match outcome:
        case list():
            return [pack(value) for value in outcome]
        case LoggedScore():
            return {"score": outcome.score, "logged": outcome.logged}
        case Failure():
            return {outcome.kind.name: outcome.message}
    return outcome


def unpack(packed: Any) -> Any:
    """Inverse of `pack`."""
    if isinstance(packed, list):
        return [unpack(value) for value in packed]
    if not isinstance(packed, dict):
        return packed
    if "score" in packed:
        return LoggedScore(**packed)
    ((kind, message),) = packed.items()
    return Failure(FailureKind[kind], message)
