"""Split the parameters into buckets. Planned once, from names, shapes and dtypes.

Invariants:
    - Tensors stay in model order.
    - Every tensor is in exactly one bucket, whole: an update call loads what it receives, so a tensor cannot be split.
    - A bucket holds at most its capacity, or a single larger tensor.
    - Every tensor starts at a multiple of its element size, as the engine's loader expects.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from math import prod

ITEM_BYTES = {"float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2, "uint8": 1}


class Receivers(Enum):
    """The ranks that receive what is gathered."""

    every_rank = "every rank"
    rank_0 = "rank 0 alone"
    # Where the collective library has no gather. The other ranks receive into scratch memory.
    rank_0_by_all_gather = "rank 0 alone, by an all-gather"


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """A parameter as the engine's loader expects it."""

    name: str  # in the checkpoint
    dtype: str  # in the engine
    shape: tuple[int, ...]

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.item_bytes


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that are sent together, packed without gaps."""

    tensors: tuple[TensorMeta, ...]

    @property
    def bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.tensors)

    @property
    def offsets(self) -> list[int]:
        return [0, *accumulate(tensor.bytes for tensor in self.tensors[:-1])]


@dataclass(frozen=True, slots=True)
class ReadyBucket:
    """A bucket that a trainer rank has gathered, as the driver needs to know it."""

    bucket: Bucket
    changed: int | None = None  # elements that differ from the last sync; None: not compared
    expected_reply: str | None = None  # prefix of the engine's reply; None: any reply
    ipc_handle: str | None = None  # for the engine rank on the same device


def plan_buckets(tensors: Sequence[TensorMeta], *, capacity: int) -> tuple[Bucket, ...]:
    """Cut `tensors` into as few buckets of at most `capacity` bytes as possible, the largest as small as possible.

    Even buckets need smaller buffers, and nothing can be sent while the first one is gathered. A tensor larger than
    `capacity` gets its own bucket.
    """
    count = len(_filled(tensors, capacity))
    enough = 1 + bisect_left(range(1, capacity), True, key=lambda size: len(_filled(tensors, size)) <= count)
    return tuple(Bucket(tuple(bucket)) for bucket in _filled(tensors, enough))


def _filled(tensors: Sequence[TensorMeta], capacity: int) -> list[list[TensorMeta]]:
    buckets: list[list[TensorMeta]] = []
    filled = 0

    for tensor in tensors:
        aligned = filled % tensor.item_bytes == 0
        if not buckets or filled + tensor.bytes > capacity or not aligned:
            buckets.append([])
            filled = 0
        buckets[-1].append(tensor)
        filled += tensor.bytes

    return buckets
