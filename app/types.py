"""What flows through a run: prompt → completion → trajectory → group → scored group → step report.

All types are immutable and hold numpy arrays, so they cross process borders without torch and without copies. In shape
comments `T` is the number of completion tokens, `P` of prompt tokens and `G` the group size.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np


class FinishReason(Enum):
    """Why the sampling of a completion ended."""

    stop = "stop"  # the model sampled a stop token, which is the last token
    length = "length"  # truncated at the token limit
    abort = "abort"  # aborted by us: partial, never trained on


class InFlight(Enum):
    """What happens to completions in flight at a weight sync."""

    drain = "drain"  # they finish before the sync
    retract = "retract"  # they continue after it with a recomputed KV cache
    in_place = "in_place"  # they continue after it on the old KV cache


class EngineMemory(Enum):
    """A region of an engine's device memory that can be released and reloaded."""

    weights = "weights"
    kv_cache = "kv_cache"
    graphs = "graphs"


class TrainerMemory(Enum):
    """A region of the trainer's device memory that can be offloaded and onloaded."""

    parameters = "parameters"
    optimizer = "optimizer"
    gradients = "gradients"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem, tokenized."""

    id: str  # "<source>/<row>@<epoch>": unique within a run
    token_ids: np.ndarray  # [P] int32
    answer: str
    source: str  # name of the data set
    question: str = ""  # of the row, without data.prefix, data.suffix and chat template
    row: Mapping[str, Any] = field(default_factory=dict)  # every column of the row, as JSON values


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters."""

    temperature: float  # 0: greedy
    top_p: float
    max_tokens: int  # completion tokens


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """A request for `group_size` completions of one prompt."""

    prompt_id: str
    token_ids: np.ndarray  # [P] int32
    group_size: int
    sampling: Sampling
    version: int  # policy version synced last when the request was made


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens `start:end` of a completion, sampled by policy `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Completion:
    """Sampled tokens with their rollout log-probabilities, as the engine reported them at the sampling temperature."""

    token_ids: np.ndarray  # [T] int32, the stop token included
    logprobs: np.ndarray  # [T] float32
    finish_reason: FinishReason
    spans: tuple[VersionSpan, ...]  # cover 0:T without gaps
    text: str | None = None  # decoded by the engine's host, without special tokens; None: not decoded

    @property
    def oldest_version(self) -> int:
        return min(span.version for span in self.spans)

    @property
    def truncated(self) -> bool:
        return self.finish_reason is FinishReason.length


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A completion of a prompt and its reward, which is NaN until it is scored."""

    prompt: Prompt
    completion: Completion
    text: str  # the decoded completion, without special tokens
    reward: float = math.nan
    reward_components: Mapping[str, float] = field(default_factory=dict)  # unweighted, by component

    @property
    def tokens(self) -> int:
        """Number of prompt and completion tokens."""
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
    """A group with its advantages. The raw rewards stay in `group`."""

    group: Group
    advantages: np.ndarray  # [G] float32


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The load of an engine."""

    groups: int  # in flight
    # Sampled since the engine started, also by running requests as of the server's last report (every few seconds).
    # A change is progress.
    completion_tokens: int
    beats: int = 0  # signs of progress of a server that does not report its tokens; a change is progress


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory of one component of a run."""

    resident: int  # bytes, RSS summed over its processes; shared pages count in each
    host_used: float  # used share of the machine's memory, or of the container's limit
    device_peak: int | None = None  # bytes, largest allocation since the last call; None: no device of its own


@dataclass(frozen=True, slots=True)
class StepReport:
    """Report of a finished step. Every metric is reduced with its own denominator."""

    version: int  # policy version that the step made
    updates: int  # optimizer updates, without skipped ones
    metrics: Mapping[str, float]


SYNC_PHASES = ("gather", "pause", "connect", "load", "verify", "resume")


@dataclass(frozen=True, slots=True)
class SyncReport:
    """Report of a weight sync. Seconds are wall-clock seconds of the driver."""

    version: int
    bytes: int
    buckets: int
    seconds: Mapping[str, float]  # of the phases, which follow each other, and `total`
    group_reused: bool = True
    bytes_full: int | None = None  # of all weights; None: all were sent
    changed_fraction: float | None = None  # of the weights since the last sync; None: not compared

    @property
    def metrics(self) -> dict[str, float]:
        """The report under its metric names."""
        metrics = {f"sync/{phase}_seconds": seconds for phase, seconds in self.seconds.items()}
        if self.changed_fraction is not None:
            metrics["sync/changed_fraction"] = self.changed_fraction
        metrics["sync/bytes_full"] = float(self.bytes if self.bytes_full is None else self.bytes_full)
        metrics["sync/bytes"] = float(self.bytes)
        metrics["sync/buckets"] = float(self.buckets)
        metrics["sync/group_reused"] = float(self.group_reused)
        return metrics
