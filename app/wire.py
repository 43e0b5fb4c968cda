"""How a delta push is written: what the trainer ranks and our plugin in the engines must agree on.

A message is a bucket like any other, so every transport carries it. It holds, by descending element size, so that each
starts aligned: tensors that are sent whole, and of all others the entries that changed. An entry is a position in its
tensor's flat checkpoint form and the new value. Positions are cut in two: the low 16 bits of each, and how many entries
fall into each block of 65,536 elements; with a 16-bit value that makes four bytes an entry.

    whole float32 │ delta.blocks int32 │ delta.low int16 │ whole 16-bit │ delta.values │ delta.envelope uint8 (JSON)

Always: an engine takes the messages of a push in their order, and a delta only onto the version that it was made from.
"""

import json
from dataclasses import dataclass
from math import prod

BLOCKS, LOW, VALUES, ENVELOPE = "delta.blocks", "delta.low", "delta.values", "delta.envelope"
BLOCK_ITEMS = 1 << 16
LOW_MASK = BLOCK_ITEMS - 1
ENTRY_BYTES = 4  # low half of the position, and the value
BLOCK_BYTES = 4


@dataclass(frozen=True, slots=True)
class SparseTensorMeta:
    """A tensor of which only some entries are sent."""

    name: str  # the checkpoint's
    shape: tuple[int, ...]
    entries: int

    @property
    def blocks(self) -> int:
        return blocks_of(prod(self.shape))

    @property
    def bytes(self) -> int:
        """What it takes in a message, but for its line in the envelope."""
        return ENTRY_BYTES * self.entries + BLOCK_BYTES * self.blocks


@dataclass(frozen=True, slots=True)
class DeltaHeader:
    """What a message says of itself."""

    version: int  # the policy that this push makes
    base: int | None  # the version that the engine must hold; None: this push is full
    index: int  # of the message in its push
    messages: int  # of the push
    changed: tuple[SparseTensorMeta, ...] = ()  # in the order of their entries

    def encode(self) -> bytes:
        rows = [[each.name, list(each.shape), each.entries] for each in self.changed]
        return json.dumps([self.version, self.base, self.index, self.messages, rows], separators=(",", ":")).encode()

    @property
    def reply(self) -> str:
        """What an engine answers that has our plugin and took the message."""
        entries = sum(each.entries for each in self.changed)
        return f"took message {self.index} of {self.messages} of policy {self.version}: {entries} entries"


def decode(text: bytes) -> DeltaHeader:
    """Inverse of `DeltaHeader.encode`."""
    version, base, index, messages, rows = json.loads(text)
    return DeltaHeader(
        version, base, index, messages, tuple(SparseTensorMeta(n, tuple(shape), k) for n, shape, k in rows)
    )


def blocks_of(items: int) -> int:
    """How many blocks a tensor of `items` elements has.

    >>> blocks_of(1), blocks_of(65536), blocks_of(65537)
    (1, 1, 2)
    """
    return -(-items // BLOCK_ITEMS)
