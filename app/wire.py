"""The format of a delta sync, shared by the trainer ranks and our plugin inside the engines.

A delta message is a bucket like any other, so every transport carries it. Its tensors are ordered by descending element
size, which keeps each of them aligned: tensors that are sent whole, the changed entries of all others, and a header. An
entry is a position in its tensor's flat checkpoint form and the new value. Positions are stored as the low 16 bits of
each, plus the number of entries in each block of 65,536 elements. With a 16-bit value an entry takes four bytes.

    whole float32 │ delta.blocks int32 │ whole 16-bit │ delta.low int16 │ delta.values │ delta.header uint8 (JSON)

Invariants:
    - An engine takes the messages of a sync in order.
    - An engine takes a delta only onto the version that it was computed from.
"""

import json
from dataclasses import dataclass
from math import prod

BLOCK_COUNTS = "delta.blocks"  # int32, entries in each block
LOW_BITS = "delta.low"  # int16, low half of each entry's position
VALUES = "delta.values"
HEADER = "delta.header"
BLOCK_ITEMS = 1 << 16  # elements
LOW_MASK = BLOCK_ITEMS - 1
ENTRY_BYTES = 4  # low half of the position, and the value
BLOCK_BYTES = 4


@dataclass(frozen=True, slots=True)
class SparseTensorMeta:
    """A tensor of which only the changed entries are sent."""

    name: str  # in the checkpoint
    shape: tuple[int, ...]
    entries: int

    @property
    def blocks(self) -> int:
        return block_count(prod(self.shape))

    @property
    def bytes(self) -> int:
        """Size in a message, without its row in the header."""
        return ENTRY_BYTES * self.entries + BLOCK_BYTES * self.blocks


@dataclass(frozen=True, slots=True)
class DeltaHeader:
    """The header of one message."""

    version: int  # the policy that this sync makes
    base: int | None  # the version that the engine must hold; None: this sync is full
    index: int  # of the message in its sync
    messages: int  # in the sync
    changed: tuple[SparseTensorMeta, ...] = ()  # in the order of their entries

    def encode(self) -> bytes:
        rows = [[tensor.name, list(tensor.shape), tensor.entries] for tensor in self.changed]
        return json.dumps([self.version, self.base, self.index, self.messages, rows], separators=(",", ":")).encode()

    @property
    def reply(self) -> str:
        """The reply of an engine that runs our plugin and loaded the message."""
        entries = sum(tensor.entries for tensor in self.changed)
        return f"loaded message {self.index} of {self.messages} of policy {self.version}: {entries} entries"


def decode(text: bytes) -> DeltaHeader:
    """Inverse of `DeltaHeader.encode`."""
    version, base, index, messages, rows = json.loads(text)
    changed = tuple(SparseTensorMeta(name, tuple(shape), entries) for name, shape, entries in rows)
    return DeltaHeader(version, base, index, messages, changed)


def block_count(elements: int) -> int:
    """Return the number of blocks of a tensor.

    >>> block_count(1), block_count(65536), block_count(65537)
    (1, 1, 2)
    """
    return -(-elements // BLOCK_ITEMS)
