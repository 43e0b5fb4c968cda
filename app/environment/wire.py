"""The messages between the driver and a worker: one JSON object a line, never unpickled.

    driver → worker   Start · Begin · Answer · Close
    worker → driver   Ready or Refused · Ask · End, Failed or Closed · Beat

The first key of an object names the message and carries its first field: `{"ask": 7, "episode": 3, "strand": 0, …}`.

Invariants:
- A worker sends exactly one of End, Failed and Closed for each Begin, after it called the environment's `close`.
- Only new tokens travel: each side appends `Ask.append` and then the sampled tokens to its own copy of the strand.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any


class WireError(Exception):
    """A line is not a message of ours."""


@dataclass(frozen=True, slots=True)
class RendererChoice:
    """What `rendering.renderer_for` takes."""

    name: str
    model_path: str
    thinking: str  # earlier reasoning at a new user message: as the template, or keep
    enable_thinking: bool = False  # the template's argument
    template: str | None = None  # text of a chat template in place of the model's own


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of an episode."""

    max_turns: int  # requests to the policy
    max_turn_tokens: int | None  # None: what is left
    max_observation_tokens: int
    timeout_s: float  # one step of the environment
    episode_s: float  # without the time it waited for engines


@dataclass(frozen=True, slots=True)
class Start:
    """The first message: what the worker runs."""

    settings: Mapping[str, Any]  # environment, renderer, limits, memory_gib


@dataclass(frozen=True, slots=True)
class Begin:
    """A new episode."""

    episode: int
    task: Mapping[str, Any]  # the fields of `protocol.Task`
    prompt: Sequence[int]  # token ids of the data set's prompt


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine sampled for an `Ask`. finish `full`: no room was left and nothing was sampled."""

    ask: int
    token_ids: Sequence[int]
    finish: str  # stop, length, full
    logprobs: Sequence[float] | None = None


@dataclass(frozen=True, slots=True)
class Close:
    """Abort an episode.

    at_once: The run ends or restarts its trainer, so that a method which runs in a thread is hardly waited for.
    """

    episode: int
    at_once: bool = False


@dataclass(frozen=True, slots=True)
class Ready:
    """The environment is loaded."""

    info: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Refused:
    """The environment cannot be loaded; the worker ends."""

    text: str  # one sentence


@dataclass(frozen=True, slots=True)
class Ask:
    """Append tokens to a strand, then sample."""

    number: int  # unique within the worker
    episode: int
    strand: int  # from 0; the number of strands so far: a new one
    append: Sequence[int]
    max_tokens: int | None
    logprobs: bool


@dataclass(frozen=True, slots=True)
class End:
    """An episode ended well."""

    episode: int
    scores: Mapping[str, float]  # the first is the score; empty: the environment has none of its own
    ending: str  # stop, length, turns, time
    turns: Sequence[Mapping[str, Any]]  # for people: role, text, tokens, seconds
    text: str  # of the last reply
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Failed:
    """An episode failed and has no score.

    kind: raised, late, value or memory, which a worker reports; died or late, if the worker ended with the episode in
    its own code; lost, if it ended while the episode waited for an engine. A lost episode is not to blame.
    """

    episode: int
    kind: str
    text: str  # one sentence
    stuck: bool = False  # code of the episode still runs: the worker is to be replaced


@dataclass(frozen=True, slots=True)
class Closed:
    """An episode was aborted."""

    episode: int
    stuck: bool = False


@dataclass(frozen=True, slots=True)
class Beat:
    """Sent once a second while any episode runs."""

    number: int


FromDriver = Start | Begin | Answer | Close
FromWorker = Ready | Refused | Ask | End | Failed | Closed | Beat
Message = FromDriver | FromWorker

_TYPES: dict[str, type[Any]] = {
    "start": Start,
    "begin": Begin,
    "answer": Answer,
    "close": Close,
    "ready": Ready,
    "refused": Refused,
    "ask": Ask,
    "end": End,
    "failed": Failed,
    "closed": Closed,
    "beat": Beat,
}
_FIELDS = {name: tuple(each.name for each in fields(kind)) for name, kind in _TYPES.items()}


def encode(message: Message) -> bytes:
    r"""Return a message as a line.

    >>> encode(Close(3))
    b'{"close":3,"at_once":false}\n'
    """
    name = type(message).__name__.lower()
    first, *others = _FIELDS[name]
    values = {name: getattr(message, first)}
    values.update((other, getattr(message, other)) for other in others)
    return json.dumps(values, separators=(",", ":"), default=_plain).encode() + b"\n"


def decode(line: bytes) -> Any:
    """Inverse of `encode`.

    Raises:
        WireError: The line is not a message.
    """
    try:
        values = json.loads(line)
        name = next(iter(values))
        first, *_ = _FIELDS[name]
        values[first] = values.pop(name)
        return _TYPES[name](**values)
    except (ValueError, LookupError, TypeError, AttributeError, StopIteration, RecursionError) as error:
        raise WireError(f"not a message of ours: {line[:80]!r}") from error


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy as Python's; anything else (dates, bytes) as text."""
    to_list = getattr(value, "tolist", None)
    return str(value) if to_list is None else to_list()


@dataclass(eq=False)
class Lines(asyncio.Protocol):
    """One end of the pipe, on an event loop.

    Args:
        receive: Called with each message.
        ended: Called once when the other end is gone (None), or with what is wrong with a line.
    """

    receive: Callable[[Any], None]
    ended: Callable[[WireError | None], None]
    _transport: asyncio.Transport | None = field(default=None, init=False)
    _pieces: list[bytes] = field(default_factory=list, init=False)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = b"".join([*self._pieces, lines[0]])
            self._pieces = []
        if rest:
            self._pieces.append(rest)

        for line in lines:
            if self._transport is None:
                return  # closed by what it received
            try:
                message = decode(line)
            except WireError as error:
                self._end(error)
                return
            self.receive(message)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(None)

    def send(self, message: Message) -> None:
        """Send a message, in the background; without effect when the other end is gone."""
        if self._transport is not None and not self._transport.is_closing():  # which is so before `connection_lost`
            self._transport.write(encode(message))

    def close(self) -> None:
        """Close this end; `ended` is not called."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    def _end(self, error: WireError | None) -> None:
        if self._transport is not None:
            self.close()
            self.ended(error)
