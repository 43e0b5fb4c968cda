"""The data that flows through a run: prompt → completion → trajectory → group → scored group → step report.

All types are immutable and hold numpy arrays, so they cross process borders without torch and without copies. In shape
comments `T` is the number of completion tokens, `P` of prompt tokens, `G` the group size, `L` the number of tokens of a
sequence and `N` of those that an engine sampled.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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


class EngineStart(Enum):
    """What an engine does while it starts, in this order."""

    importing = "importing SGLang"
    loading = "loading the weights"
    allocating = "allocating the KV cache"  # and capturing graphs
    warming_up = "warming up"


class EngineMemory(Enum):
    """A region of an engine's device memory that can be released and reloaded, with SGLang's tag."""

    weights = "weights"
    kv_cache = "kv_cache"
    graphs = "cuda_graph"


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
    question: str = ""  # of the row, without framing and chat template; of messages, the last one's text
    row: Mapping[str, Any] = field(default_factory=dict)  # every column of the row, as JSON values
    messages: tuple[Mapping[str, Any], ...] = ()  # of a prompt that is a conversation, as the chat template gets them
    reply: Mapping[str, Any] | None = None  # the message to imitate, of a demonstration
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # the row's: `tools`, and variables of its own


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters."""

    temperature: float  # 0: greedy
    top_p: float
    max_tokens: int  # completion tokens
    top_k: int | None = None  # None: the whole vocabulary
    stop: tuple[str, ...] = ()  # texts that end a completion, as its last tokens


class Ending(Enum):
    """Why an episode ended."""

    stop = "stop"  # the environment ended it
    length = "length"  # no token was left for another turn
    turns = "turns"  # environment.max_turns
    time = "time"  # environment.episode_s


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """A request for `group_size` completions of one prompt; of an episode's turn, for one."""

    prompt_id: str
    token_ids: np.ndarray  # [P] int32
    group_size: int
    sampling: Sampling
    version: int  # policy version synced last when the request was made
    turn: str = ""  # of an episode: tells apart the requests of one prompt that are in flight together

    @property
    def name(self) -> str:
        """Unique among requests in flight."""
        return f"{self.prompt_id} turn {self.turn}" if self.turn else self.prompt_id


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Sampled tokens `start:end` of a completion or sequence, sampled by policy `version`."""

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
    cached_tokens: int = 0  # of the prompt, that the engine had in its KV cache
    verify_passes: int = 0  # that sampled the tokens, all but the first one; 0 without drafts
    retractions: int = 0  # times that a full KV cache interrupted it; what it had there was computed again
    teacher_logprobs: np.ndarray | None = None  # [T] float32, of the same tokens; None without a teacher

    @classmethod
    def nothing(cls, version: int) -> "Completion":
        """Return a completion without tokens by policy `version`."""
        none = (VersionSpan(version, 0, 0),)
        return cls(np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32), FinishReason.length, none)

    @property
    def oldest_version(self) -> int:
        if len(self.spans) == 1:  # the usual case, read several times
            return self.spans[0].version
        return min(span.version for span in self.spans)

    @property
    def truncated(self) -> bool:
        return self.finish_reason is FinishReason.length


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One sequence of an episode: every request for its sampled tokens began with all tokens before them.

    Only sampled tokens are trained on. A sequence is built by appending and never rendered again, so its tokens are
    those that the engine saw.
    """

    token_ids: np.ndarray  # [L] int32
    sampled: np.ndarray  # [L] bool; False: prompt, observation, template
    logprobs: np.ndarray  # [N] float32, of the sampled tokens, as the engine reported them; zeros of a demonstration
    spans: tuple[VersionSpan, ...]  # cover 0:N without gaps; none of a demonstration
    teacher_logprobs: np.ndarray | None = None  # [N] float32, of the sampled tokens; None without a teacher

    @classmethod
    def of(cls, prompt: Prompt, completion: Completion) -> "TokenSequence":
        """Return the sequence of a single turn."""
        sampled = np.zeros(len(prompt.token_ids) + len(completion.token_ids), dtype=bool)
        sampled[len(prompt.token_ids) :] = True
        token_ids = np.concatenate([prompt.token_ids, completion.token_ids])
        return cls(token_ids, sampled, completion.logprobs, completion.spans, completion.teacher_logprobs)

    @classmethod
    def demonstration(cls, token_ids: np.ndarray, imitated: np.ndarray) -> "TokenSequence":
        """Return a sequence [L] int32 whose marked tokens [L] bool are imitated, in place of sampled ones."""
        return cls(token_ids, imitated, np.zeros(int(imitated.sum()), dtype=np.float32), ())

    @property
    def versions(self) -> np.ndarray:
        """The policy version that sampled each token, [N] int64; -1 for those of a demonstration."""
        if not self.spans:
            return np.full(len(self.logprobs), -1)
        return np.repeat([span.version for span in self.spans], [span.end - span.start for span in self.spans])

    @property
    def opening_tokens(self) -> int:
        """Tokens before the first sampled one."""
        return int(self.sampled.argmax()) if len(self.logprobs) else len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of an episode, for people."""

    role: str  # user, assistant, tool or system
    text: str
    tokens: int  # sampled, or rendered for the policy
    seconds: float  # waited for it


@dataclass(frozen=True, slots=True)
class Episode:
    """The exchange of the policy and an environment in one trajectory."""

    sequences: tuple[TokenSequence, ...]  # several if a history was rewritten, or an agent had more conversations
    turns: tuple[Turn, ...]
    ending: Ending
    scores: Mapping[str, float]  # by the environment; the first one is the score
    metrics: Mapping[str, float]  # measured by the environment and its worker


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The policy's sample for a prompt, and its reward, which is NaN until it is scored."""

    prompt: Prompt
    completion: Completion  # of an episode: the last one
    text: str  # the decoded completion, without special tokens; of an episode: the last reply
    reward: float = math.nan
    reward_components: Mapping[str, float] = field(default_factory=dict)  # unweighted, by component
    episode: Episode | None = None  # None: a single turn

    @property
    def sequences(self) -> tuple[TokenSequence, ...]:
        return self.episode.sequences if self.episode else (TokenSequence.of(self.prompt, self.completion),)

    def with_teacher(self, logprobs: Sequence[np.ndarray]) -> "Trajectory":
        """Return the trajectory with a teacher's log-probabilities [N] of each of its sequences."""
        if self.episode is None:
            (only,) = logprobs
            return replace(self, completion=replace(self.completion, teacher_logprobs=only))
        scored = [replace(each, teacher_logprobs=own) for each, own in zip(self.sequences, logprobs, strict=True)]
        return replace(self, episode=replace(self.episode, sequences=tuple(scored)))

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The messages of an episode; none of a single turn."""
        return self.episode.turns if self.episode else ()

    @property
    def scores(self) -> Mapping[str, float]:
        """What the environment scored; nothing without one."""
        return self.episode.scores if self.episode else {}

    @property
    def tokens(self) -> int:
        if self.episode is None:
            return len(self.prompt.token_ids) + len(self.completion.token_ids)
        return sum(len(sequence.token_ids) for sequence in self.episode.sequences)

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens before the first sampled one."""
        return self.episode.sequences[0].opening_tokens if self.episode else len(self.prompt.token_ids)

    @property
    def sampled_tokens(self) -> int:
        if self.episode is None:
            return len(self.completion.token_ids)
        return sum(len(sequence.logprobs) for sequence in self.episode.sequences)

    @property
    def verify_passes(self) -> int:
        """Passes of engines that sampled the tokens; 0 without drafts."""
        return int(self.episode.metrics.get("verify_passes", 0)) if self.episode else self.completion.verify_passes

    @property
    def response_tokens(self) -> int:
        """Number of tokens after the opening of each sequence, observations included."""
        if self.episode is None:
            return len(self.completion.token_ids)
        return sum(len(sequence.token_ids) - sequence.opening_tokens for sequence in self.episode.sequences)

    @property
    def oldest_version(self) -> int:
        if self.episode is None:
            return self.completion.oldest_version
        return min(span.version for sequence in self.episode.sequences for span in sequence.spans)

    @property
    def truncated(self) -> bool:
        return self.completion.truncated if self.episode is None else self.episode.ending is Ending.length


@dataclass(frozen=True, slots=True)
class Group:
    """The trajectories of one prompt. Those whose environment failed are missing."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]  # G, or at least 2

    @property
    def oldest_version(self) -> int:
        return min(trajectory.oldest_version for trajectory in self.trajectories)

    @property
    def rewards(self) -> np.ndarray:  # [G] float64
        return np.array([trajectory.reward for trajectory in self.trajectories], dtype=np.float64)

    @property
    def completion_tokens(self) -> int:
        return sum(trajectory.sampled_tokens for trajectory in self.trajectories)


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
    adapters: int | None = None  # loaded on the engine that has the most; None: all weights were synced

    @property
    def metrics(self) -> dict[str, float]:
        metrics = {f"sync/{phase}_seconds": seconds for phase, seconds in self.seconds.items()}
        if self.changed_fraction is not None:
            metrics["sync/changed_fraction"] = self.changed_fraction
        if self.adapters is not None:
            metrics["lora/loaded_adapters"] = float(self.adapters)
        metrics["sync/bytes_full"] = float(self.bytes if self.bytes_full is None else self.bytes_full)
        metrics["sync/bytes"] = float(self.bytes)
        metrics["sync/buckets"] = float(self.buckets)
        metrics["sync/group_reused"] = float(self.group_reused)
        return metrics
