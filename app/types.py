"""What flows through a run: prompt → completion → trajectory → group → scored group → step report.

Everything here is immutable and holds numpy arrays: it crosses process borders without torch and without copies.
`T` is the number of completion tokens, `P` of prompt tokens, `G` the group size.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import numpy as np


class FinishReason(Enum):
    """Why sampling of a completion ended."""

    stop = "stop"  # the model ended it; the stop token is its last token
    length = "length"  # truncated at the token limit
    abort = "abort"  # we ended it: partial, never trained on


class InFlight(Enum):
    """What happens to completions in flight at a push."""

    drain = "drain"  # they finish first
    retract = "retract"  # they continue with a recomputed cache
    in_place = "in_place"  # they continue on the old cache


class EngineMemory(Enum):
    """A part of an engine's device memory that can be released and reloaded."""

    weights = "weights"
    kv_cache = "kv_cache"
    graphs = "graphs"


class TrainerMemory(Enum):
    """A part of the trainer's device memory that can be offloaded and onloaded."""

    parameters = "parameters"
    optimizer = "optimizer"
    gradients = "gradients"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem as the engine sees it."""

    id: str  # "<source>/<row>@<epoch>": unique over the whole run
    token_ids: np.ndarray  # [P] int32
    answer: str
    source: str  # the data set's name


@dataclass(frozen=True, slots=True)
class Sampling:
    """How completions are sampled."""

    temperature: float  # 0 is greedy
    top_p: float
    max_tokens: int  # completion tokens


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """What an engine is asked for: `group_size` completions of one prompt."""

    prompt_id: str
    token_ids: np.ndarray  # [P] int32
    group_size: int
    sampling: Sampling
    version: int  # the last pushed policy version when the request was made


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens `start:end` of a completion were sampled by policy `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Completion:
    """Sampled tokens with the log-probabilities that the engine reported for them, at the sampling temperature."""

    token_ids: np.ndarray  # [T] int32, the stop token included
    logprobs: np.ndarray  # [T] float32
    finish_reason: FinishReason
    spans: tuple[VersionSpan, ...]  # cover 0:T without gaps
    text: str | None = None  # decoded by the engine's host, without special tokens; null: not decoded there

    @property
    def oldest_version(self) -> int:
        return min(span.version for span in self.spans)

    @property
    def truncated(self) -> bool:
        return self.finish_reason is FinishReason.length


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A completion of a prompt and what it earned. `reward` is NaN until it was scored."""

    prompt: Prompt
    completion: Completion
    text: str  # the decoded completion, without special tokens
    reward: float = math.nan
    reward_components: Mapping[str, float] = field(default_factory=dict)  # unweighted, by part name

    @property
    def tokens(self) -> int:
        """Prompt and completion tokens."""
        return len(self.prompt.token_ids) + len(self.completion.token_ids)


@dataclass(frozen=True, slots=True)
class Group:
    """The trajectories of one prompt."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]  # G

    @property
    def oldest_version(self) -> int:
        return min(trajectory.completion.oldest_version for trajectory in self.trajectories)

    @property
    def rewards(self) -> np.ndarray:  # [G] float64
        return np.array([trajectory.reward for trajectory in self.trajectories], dtype=np.float64)

    @property
    def completion_tokens(self) -> int:
        return sum(len(trajectory.completion.token_ids) for trajectory in self.trajectories)


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A group with its advantages; the raw rewards stay in `group`."""

    group: Group
    advantages: np.ndarray  # [G] float32


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What an engine is busy with."""

    groups: int  # requests in flight
    completion_tokens: int  # generated since the engine started


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What a part of the run holds, in bytes, and how full its machine is."""

    resident: int  # RSS of its processes, shared pages counted in each
    host_used: float  # share of the machine's memory (of the container's limit, where it has one)
    device_peak: int | None = None  # largest allocation since it was asked last; None: no device of its own


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a finished step says of itself. Each metric was divided by its own denominator already."""

    version: int  # the policy version that this step made
    updates: int  # optimizer updates done (skipped ones not counted)
    metrics: Mapping[str, float]


SYNC_PHASES = ("gather", "pause", "connect", "load", "verify", "resume")


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What a push did, and how long each phase took (seconds, from the driver's clock)."""

    version: int
    bytes: int
    buckets: int
    seconds: Mapping[str, float]  # gather, pause, connect, load, verify, resume: one after the other; total
    group_reused: bool = True
    bytes_full: int | None = None  # what all weights take; None: they were what was sent
    changed_fraction: float | None = None  # of the weights, since the last push; None: not compared

    @property
    def metrics(self) -> dict[str, float]:
        """The report under the names of the log."""
        phases = {f"sync/{phase}_seconds": seconds for phase, seconds in self.seconds.items()}
        compared = {} if self.changed_fraction is None else {"sync/changed_fraction": self.changed_fraction}
        return {
            **phases,
            **compared,
            "sync/bytes_full": float(self.bytes if self.bytes_full is None else self.bytes_full),
            "sync/bytes": float(self.bytes),
            "sync/buckets": float(self.buckets),
            "sync/group_reused": float(self.group_reused),
        }
