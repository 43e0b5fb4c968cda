"""The messages between the driver and a worker: one JSON object a line, never unpickled.

    driver → worker   Start · Begin · Close · a handler's own
    worker → driver   Ready or Refused · Failed or Closed · Heartbeat · a handler's own

The first key of an object names the message and carries its first field: `{"close": 3, "force": false}`.

Invariant: a worker sends exactly one last message for each Begin: a handler's result, Failed or Closed.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any


class WireError(Exception):
    """A line is not a message of ours."""


@dataclass(frozen=True, slots=True)
class Start:
    """The first message: what the handler loads."""

    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Ready:
    """The handler is loaded."""

    info: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Refused:
    """The handler cannot be loaded; the worker ends."""

    text: str


@dataclass(frozen=True, slots=True)
class Begin:
    """A new job."""

    job: int
    payload: Any


@dataclass(frozen=True, slots=True)
class Request:
    """Base of a job's requests to the driver; the job waits for the answer."""

    job: int
    number: int  # unique within the worker


@dataclass(frozen=True, slots=True)
class Close:
    """Abort a job.

    force: The run ends or restarts its trainer: code that runs in a thread gets a few seconds only.
    """

    job: int
    force: bool = False


@dataclass(frozen=True, slots=True)
class Closed:
    """A job was aborted."""

    job: int
    stuck: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """A job failed.

    kind: The handler's (raised, late, value, memory); died or late, if the worker ended while the job's own code was
    running; lost, if the worker ended because of another job or was closed.
    """

    job: int
    kind: str
    text: str  # one sentence
    stuck: bool = False  # code of the job still runs: the worker is to be replaced


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A sign of life while jobs run."""

    number: int


class Codec:
    r"""Encodes and decodes these messages and a handler's own.

    >>> Codec().encode(Close(3))
    b'{"close":3,"force":false}\n'
    """

    def __init__(self, *own: type[Any]) -> None:
        types = (Start, Ready, Refused, Begin, Close, Closed, Failed, Heartbeat, *own)
        self._types = {each.__name__.lower(): each for each in types}
        self._fields = {name: [each.name for each in fields(kind)] for name, kind in self._types.items()}

    def encode(self, message: Any) -> bytes:
        name = type(message).__name__.lower()
        first, *others = self._fields[name]
        values = {name: getattr(message, first), **{other: getattr(message, other) for other in others}}
        return json.dumps(values, separators=(",", ":"), default=_plain).encode() + b"\n"

    def decode(self, line: bytes) -> Any:
        """Inverse of `encode`. Raises `WireError` if the line is not a message."""
        try:
            values = json.loads(line)
            name = next(iter(values))
            values[self._fields[name][0]] = values.pop(name)
            return self._types[name](**values)
        except (ValueError, LookupError, TypeError, AttributeError, StopIteration, RecursionError) as error:
            raise WireError(f"not a message of ours: {line[:80]!r}") from error


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy as Python's; anything else (dates, bytes) as text."""
    to_list = getattr(value, "tolist", None)
    return str(value) if to_list is None else to_list()


@dataclass(eq=False)
class LineProtocol(asyncio.Protocol):
    """One end of the pipe, on an event loop."""

    codec: Codec
    receive: Callable[[Any], None]  # called with each message
    ended: Callable[[WireError | None], None]  # called once: the other end is gone (None), or a line is wrong
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
                message = self.codec.decode(line)
            except WireError as error:
                self._end(error)
                return
            self.receive(message)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(None)

    def send(self, message: Any) -> None:
        """Send a message, in the background; without effect when the other end is gone."""
        if self._transport is not None and not self._transport.is_closing():  # which is so before `connection_lost`
            self._transport.write(self.codec.encode(message))

    def close(self) -> None:
        """Close this end; `ended` is not called."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    def _end(self, error: WireError | None) -> None:
        if self._transport is not None:
            self.close()
            self.ended(error)
