"""The format of a delta sync, shared by the trainer ranks and our plugin inside the engines.

A delta message is a bucket like any other, so every transport carries it. Its tensors are ordered by descending element
size, which keeps each of them aligned: tensors that are sent whole, the changed entries of all others, and a header. An
entry is a position in its tensor's flat checkpoint form and the new value. Of a position only the gap is sent, a byte:
the number of unchanged elements since the previous entry. Byte 255 has no entry and stands for 255 unchanged elements.
With 16-bit values of which 1 % changed, an entry takes about three bytes.

    whole float32 │ whole 16-bit │ delta.values │ delta.header uint8 (JSON) │ delta.gaps uint8

Invariants:
    - An engine takes the messages of a sync in order.
    - An engine takes a delta only onto the version that it was computed from.
"""

import json
from dataclasses import astuple, dataclass
from math import prod

GAPS = "delta.gaps"  # uint8
VALUES = "delta.values"
HEADER = "delta.header"
MORE = 255  # the gap byte without an entry
VALUE_BYTES = 2


@dataclass(frozen=True, slots=True)
class SparseTensorMeta:
    """A tensor of which only the changed entries are sent."""

    name: str  # in the checkpoint
    shape: tuple[int, ...]
    entries: int
    gaps: int = 0  # bytes

    @property
    def max_bytes(self) -> int:
        """The largest size in a message that `entries` can have, without the row in the header."""
        return (1 + VALUE_BYTES) * self.entries + prod(self.shape) // MORE


@dataclass(frozen=True, slots=True)
class DeltaHeader:
    """The header of one message."""

    version: int  # the policy that this sync makes
    base: int | None  # the version that the engine must hold; None: this sync is full
    index: int  # of the message in its sync
    messages: int  # in the sync
    changed: tuple[SparseTensorMeta, ...] = ()  # in the order of their entries

    def encode(self) -> bytes:
        return json.dumps(astuple(self), separators=(",", ":")).encode()

    @property
    def reply(self) -> str:
        """The reply of an engine that runs our plugin and loaded the message."""
        entries = sum(tensor.entries for tensor in self.changed)
        return f"loaded message {self.index} of {self.messages} of policy {self.version}: {entries} entries"


def decode(text: bytes) -> DeltaHeader:
    """Inverse of `DeltaHeader.encode`."""
    version, base, index, messages, rows = json.loads(text)
    changed = tuple(SparseTensorMeta(name, tuple(shape), entries, gaps) for name, shape, entries, gaps in rows)
    return DeltaHeader(version, base, index, messages, changed)
