"""Runs inside SGLang's processes: loads the messages of a delta sync into the model. Trainer ranks import the format.

A delta message is a bucket like any other, so every transport carries it. Its tensors are ordered by descending element
size, which keeps each of them aligned: tensors that are sent in full, the changed entries of all others, and a header.
An entry is a position in its tensor's flat checkpoint form and the new value. Only the gap to the previous position is
sent, in a byte: the number of unchanged elements in between. Byte 255 has no entry and stands for 255 unchanged
elements. With 1 % of the 16-bit values changed, an entry takes about three bytes.

    full float32 │ full 16-bit │ delta.values │ delta.header uint8 (JSON) │ delta.gaps uint8

Two methods of SGLang's weight updater are wrapped, one per transport. A bucket without a header is loaded by SGLang.

Invariants:
    - Messages are loaded in order, and a delta only onto the version that it was computed from. A lost, repeated or
      reordered message is refused.
    - The entries that the ranks wrote are counted and summed. An entry that no parameter took is an error.
    - After any failure the engine has no version until the next full sync.
    - All ranks of an engine refuse together, because rank 0 replies for all of them.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from app.rollout.engine.sglang_plugin.sparse_tensor import SparseTensor

UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater."
LOAD_FROM_COLLECTIVE = UPDATER + "load_weights_from_distributed"
LOAD_FROM_IPC = UPDATER + "_update_weights_from_flattened_bucket"
NamedTensors = Sequence[tuple[str, Tensor]]
Reply = tuple[bool, str]  # success, message

GAPS = "delta.gaps"  # uint8
VALUES = "delta.values"
HEADER = "delta.header"
MORE = 255  # the gap byte without an entry
VALUE_BYTES = 2


@dataclass(frozen=True, slots=True)
class SparseTensorMeta:
    """A tensor that is sent as its changed entries."""

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


class DeltaLoader:
    """The loader of one scheduler process."""

    def __init__(self) -> None:
        # Sums counts over the tensor-parallel ranks of the engine, which all call it.
        self._sum_over_ranks: Callable[[list[int]], list[int]] = all_reduce_counts
        self.synced_version: int | None = None  # of the last complete sync; None: unknown, needs a full sync
        self._next: tuple[int, int | None, int] | None = None  # version, base and index of the next message of a sync

    def from_collective(self, original: Callable[..., Reply], updater: Any, named_tensors: NamedTensors) -> Reply:
        if all(name != HEADER for name, _ in named_tensors):
            return self._load_in_full(partial(original, updater, named_tensors))
        return self.load(updater.get_model(), named_tensors)

    def from_ipc(
        self, original: Callable[..., Reply], updater: Any, flattened_tensor_bucket_dict: dict[str, Any]
    ) -> Reply:
        flat = flattened_tensor_bucket_dict["flattened_tensor"]
        metadata = flattened_tensor_bucket_dict["metadata"]
        if all(meta.name != HEADER for meta in metadata):
            reply = self._load_in_full(
                partial(original, updater, flattened_tensor_bucket_dict=flattened_tensor_bucket_dict)
            )
        else:
            reply = self.load(
                updater.get_model(),
                [(m.name, flat[m.start_idx : m.end_idx].view(m.dtype).reshape(m.shape)) for m in metadata],
            )
        # Ranks other than 0, which alone replies, may still copy when the sender fills its buffer again.
        if flat.device.type != "cpu":
            torch.get_device_module(flat.device).current_stream().synchronize()
        return reply

    def _load_in_full(self, load: Callable[[], Reply]) -> Reply:
        """Load a bucket by SGLang, whose rank 0 would reply for the others whatever became of theirs."""
        self._reset()
        try:
            success, message = load()
        except Exception as error:  # any: the other ranks wait in the collective below
            success, message = False, f"{type(error).__name__}: {error}"
        (failures,) = self._sum_over_ranks([int(not success)])
        return (success, message) if not failures or not success else (False, "another rank of this engine failed")

    def load(self, model: Any, named_tensors: NamedTensors) -> Reply:
        tensors = dict(named_tensors)
        header = decode(bytes(tensors.pop(HEADER).cpu().numpy()))
        refusal = self._refusal(header)
        self._reset()  # until the message is loaded
        if refusal is not None:
            return False, refusal

        failure: str | None = None
        hits: list[list[int]] = [[] for _ in header.changed]  # by tensor: entries written by each copy
        entries = [tensors.pop(name, None) for name in (GAPS, VALUES)]
        try:
            with torch.no_grad():
                model.load_weights([*tensors.items(), *sparse_tensors(header.changed, entries, hits)])
        except Exception as error:  # any: the other ranks wait in the collective below
            failure = f"{type(error).__name__}: {error}"

        failure = self._failure_on_any_rank(header.changed, hits, failure)
        if failure is not None:
            return False, f"message {header.index} of policy {header.version} was not loaded: {failure}"
        if header.index + 1 == header.messages:
            self.synced_version = header.version
        else:
            self._next = (header.version, header.base, header.index + 1)
        return True, header.reply

    def _refusal(self, header: DeltaHeader) -> str | None:
        """Return why this message cannot be the next one, or None."""
        message = f"message {header.index} of policy {header.version}"
        if header.index:
            if self._next == (header.version, header.base, header.index):
                return None
            return f"{message} is out of order: the previous message was not loaded"
        if header.base is not None and header.base != self.synced_version:
            synced = "no full sync" if self.synced_version is None else f"policy {self.synced_version}"
            return f"{message} holds changes of policy {header.base}, but this engine holds {synced}"
        return None

    def _failure_on_any_rank(
        self, changed: Sequence[SparseTensorMeta], hits: Sequence[Sequence[int]], failure: str | None
    ) -> str | None:
        """Return the failure of any rank, or the tensor with entries that no rank wrote. A collective."""
        failures, *counts = self._sum_over_ranks([int(failure is not None), *(sum(each) for each in hits)])
        if failures:
            return failure or "another rank of this engine failed"
        for tensor, count in zip(changed, counts, strict=True):
            if count < tensor.entries:
                return f"{tensor.name}: {count} of {tensor.entries} entries were written"
        return None

    def _reset(self) -> None:
        self.synced_version = None
        self._next = None


def sparse_tensors(
    changed: Sequence[SparseTensorMeta], entries: Sequence[Tensor | None], hits: Sequence[list[int]]
) -> Iterator[tuple[str, SparseTensor]]:
    """Yield the changed tensors of a message, each with its entries.

    Args:
        changed: The tensors, in the order of their entries.
        entries: Gap bytes [m] uint8 and values [n], each over all tensors.
        hits: By tensor, collects the entries written.
    """
    gaps, values = entries
    if gaps is None or values is None:
        return

    first_gap = 0
    first_entry = 0
    for tensor, tensor_hits in zip(changed, hits, strict=True):
        position = positions(gaps[first_gap : first_gap + tensor.gaps])
        layout = torch.empty(tensor.shape, dtype=values.dtype, device="meta")
        value = values[first_entry : first_entry + tensor.entries]
        yield tensor.name, SparseTensor(layout, position, value, tensor_hits)

        first_gap += tensor.gaps
        first_entry += tensor.entries


def positions(gaps: Tensor) -> Tensor:
    """Decode the gap bytes of a tensor: [n] int64, ascending."""
    has_entry = gaps != MORE
    advanced = gaps.long().add_(has_entry).cumsum_(0)
    return advanced.masked_select(has_entry).sub_(1)


def all_reduce_counts(counts: list[int]) -> list[int]:
    """Return the sums over the tensor-parallel ranks of this engine. A collective."""
    from sglang.srt.distributed.parallel_state import get_tp_group

    tp_group = get_tp_group()
    total = torch.tensor(counts, dtype=torch.int64)
    if tp_group.world_size > 1:
        dist.all_reduce(total, group=tp_group.cpu_group)
    return total.tolist()
