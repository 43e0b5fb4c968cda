"""How the parameters are cut into buckets: computed once, from names, shapes and dtypes.

What always holds: model order; every tensor in exactly one bucket, whole (an update call loads what it receives, so a
tensor cannot be cut); a bucket holds at most the larger of the capacity and its only tensor; every tensor starts at a
multiple of its element size, as the engine's loader expects.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

ITEM_BYTES = {"float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2, "uint8": 1}


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """A parameter as the engine's loader knows it."""

    name: str  # the checkpoint's
    dtype: str  # the engine's
    shape: tuple[int, ...]

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.item_bytes


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that travel together, one behind the other without gaps."""

    tensors: tuple[TensorMeta, ...]

    @property
    def bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.tensors)

    @property
    def offsets(self) -> list[int]:
        """Where each tensor starts, in bytes."""
        starts = [0]
        for tensor in self.tensors[:-1]:
            starts.append(starts[-1] + tensor.bytes)
        return starts


def plan_buckets(tensors: Sequence[TensorMeta], *, capacity: int) -> tuple[Bucket, ...]:
    """Cut `tensors` into buckets of at most `capacity` bytes, a larger tensor alone."""
    buckets: list[list[TensorMeta]] = []
    filled = 0
    for tensor in tensors:
        aligned = filled % tensor.item_bytes == 0
        if not buckets or filled + tensor.bytes > capacity or not aligned:
            buckets.append([])
            filled = 0
        buckets[-1].append(tensor)
        filled += tensor.bytes
    return tuple(Bucket(tuple(bucket)) for bucket in buckets)


@dataclass(frozen=True, slots=True)
class ReadyBucket:
    """What a trainer rank has in a buffer, as the driver needs to know it."""

    bucket: Bucket
    changed: int | None = None  # elements that a delta sends; None: nothing was compared
    reply: str | None = None  # what an engine has to answer; None: nothing in particular
    handle: str | None = None  # for the engine rank on the same card
