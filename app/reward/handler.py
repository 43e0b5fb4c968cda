"""What a reward worker runs: it loads one component, and scores the trajectories of one call after another.

The main thread calls the reward, since some limit themselves with signals. The driver's messages are safe to unpickle,
and trajectories hold arrays; nothing that a worker sends is unpickled.
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

from app.reward.component import RewardComponent, RewardFunction
from app.reward.outcome import Failure, FailureKind, LoggedScore, Outcome, Value, evaluate, failures
from app.types import Trajectory
from app.worker.wire import Codec

MAX_BUILT_IN_MEMORY = 4 << 30  # bytes of address space of a built-in: 9^{9^{9^9}} must not exhaust the machine


@dataclass(frozen=True, slots=True)
class Scored:
    """The outcome of a call: an entry for each trajectory, or one Failure in place of the list.

    A number or None stands for itself, [number, {name: number}] for a LoggedScore, {kind: text} for a Failure.
    """

    job: int
    outcome: Any


CODEC = Codec(Scored)


def load(settings: Mapping[str, Any]) -> "RewardHandler":
    """Load the component with these fields. Raises `LoadError`."""
    component = RewardComponent(**settings)
    reward = component.load()
    if component.key is None:
        _limit_memory()
    return RewardHandler(component, reward)


class RewardHandler:
    """Scores trajectories with a component."""

    def __init__(self, component: RewardComponent, reward: RewardFunction) -> None:
        self.info: Mapping[str, Any] = {}
        self._component = component
        self._reward = reward

    def serve(self, pipe: socket.socket) -> None:
        """Answer one call after another until the driver closes the pipe."""
        with asyncio.Runner() as runner:
            for line in pipe.makefile("rb"):
                begin = CODEC.decode(line)
                trajectories = pickle.loads(base64.b64decode(begin.payload))
                outcome = evaluate(self._reward, trajectories, runner)
                self._log(trajectories, outcome)
                pipe.sendall(CODEC.encode(Scored(begin.job, pack_outcome(outcome))))

    def _log(self, trajectories: Sequence[Trajectory], outcome: Outcome) -> None:
        """Write the failures of a call, each kind of message once, to the log, which is stderr."""
        prompts = ", ".join(dict.fromkeys(trajectory.prompt.id for trajectory in trajectories))
        for failure in dict.fromkeys(failures(outcome)):
            sys.stderr.write(
                f"{self._component.name} failed on {prompts}, {len(trajectories)} trajectories: {failure}\n"
            )


def pack_trajectories(trajectories: Sequence[Trajectory]) -> str:
    """Return the payload of a call, as JSON text."""
    return base64.b64encode(pickle.dumps(trajectories, pickle.HIGHEST_PROTOCOL)).decode()


def pack_outcome(outcome: Outcome) -> Any:
    """Return an outcome as JSON values."""
    return _pack(outcome) if isinstance(outcome, Failure) else [_pack(value) for value in outcome]


def unpack_outcome(packed: Any) -> Outcome:
    """Inverse of `pack_outcome`."""
    if isinstance(packed, dict):
        return _failure(packed)
    return [_unpack(value) for value in packed]


def _pack(value: Value) -> Any:
    if isinstance(value, LoggedScore):
        return [value.score, value.logged]
    return {value.kind.name: value.message} if isinstance(value, Failure) else value


def _unpack(value: Any) -> Value:
    if isinstance(value, list):
        return LoggedScore(*value)
    return _failure(value) if isinstance(value, dict) else value


def _failure(packed: Mapping[str, str]) -> Failure:
    ((kind, message),) = packed.items()
    return Failure(FailureKind[kind], message)


def _limit_memory() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MAX_BUILT_IN_MEMORY if hard == resource.RLIM_INFINITY else min(MAX_BUILT_IN_MEMORY, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
