"""What our plugin does inside an engine with the messages of a delta push.

Two methods of SGLang's weight updater are wrapped, one for each transport. A bucket without an envelope (app/wire.py)
is SGLang's own business. Of one with an envelope:

always, it is taken only in its turn, and a delta only onto the version that it was made from, so a lost, repeated or
reordered message is refused; what every rank wrote is counted and summed, so an entry that no parameter took is an
error; and whatever fails, no version is held any more until a full push has come. Ranks refuse together, since rank 0
answers for all of them.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from app.rollout.sglang_plugin.sparse_tensor import SparseTensor
from app.wire import (
    BLOCK_COUNTS,
    BLOCK_ITEMS,
    HEADER,
    LOW_BITS,
    LOW_MASK,
    VALUES,
    DeltaHeader,
    SparseTensorMeta,
    decode,
)

UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
Named = Sequence[tuple[str, Tensor]]
Answer = tuple[bool, str]


def register() -> None:
    """Wrap both entrances; SGLang only logs it where they are not there, and the driver misses our answer then."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    loader = Loader()
    HookRegistry.register(f"{UPDATER}.load_weights_from_distributed", loader.from_group, HookType.AROUND)
    HookRegistry.register(f"{UPDATER}._update_weights_from_flattened_bucket", loader.from_handle, HookType.AROUND)


class Loader:
    """One for each scheduler process."""

    def __init__(self, summed: Callable[[list[int]], list[int]] | None = None):
        """`summed` over the ranks of the engine, which all call it; null: SGLang's."""
        self._summed = summed or over_ranks
        self.held: int | None = None  # the version that all messages of a push have made
        self._open: tuple[int, int | None, int] | None = None  # version, base and next message of an unfinished push

    def from_group(self, original: Callable[..., Answer], updater: Any, named_tensors: Named) -> Answer:
        """Around `load_weights_from_distributed`."""
        if all(name != HEADER for name, _ in named_tensors):
            self._forget()
            return original(updater, named_tensors)
        return self.take(updater.get_model(), named_tensors)

    def from_handle(
        self, original: Callable[..., Answer], updater: Any, flattened_tensor_bucket_dict: dict[str, Any]
    ) -> Answer:
        """Around `_update_weights_from_flattened_bucket`."""
        flat, metadata = (flattened_tensor_bucket_dict[key] for key in ("flattened_tensor", "metadata"))
        if all(meta.name != HEADER for meta in metadata):
            self._forget()
            return original(updater, flattened_tensor_bucket_dict=flattened_tensor_bucket_dict)
        named = [
            (meta.name, flat[meta.start_idx : meta.end_idx].view(meta.dtype).reshape(meta.shape)) for meta in metadata
        ]
        return self.take(updater.get_model(), named)

    def take(self, model: Any, named: Named) -> Answer:
        """Load one message."""
        tensors = dict(named)
        envelope = decode(bytes(tensors.pop(HEADER).cpu().numpy()))
        refusal = self._out_of_turn(envelope)
        if refusal is not None:
            self._forget()
            return False, refusal
        self._forget()  # until all is well
        failure, hits = None, [[] for _ in envelope.changed]  # type: ignore[var-annotated]
        entries = [tensors.pop(name, None) for name in (BLOCK_COUNTS, LOW_BITS, VALUES)]
        try:
            with torch.no_grad():
                model.load_weights([*tensors.items(), *sparse(envelope.changed, entries, hits)])
        except Exception as error:  # whatever it is: the other ranks wait for our count
            failure = f"{type(error).__name__}: {error}"
        failure = self._short(envelope.changed, hits, failure)
        if failure is not None:
            return False, f"message {envelope.index} of policy {envelope.version} was not loaded: {failure}"
        self._advance(envelope)
        return True, envelope.reply

    def _short(
        self, changed: Sequence[SparseTensorMeta], hits: Sequence[Sequence[int]], failure: str | None
    ) -> str | None:
        """What went wrong on any rank: an exception there, or entries that none of them wrote. A collective."""
        failures, *counts = self._summed([int(failure is not None), *(sum(each) for each in hits)])
        if failures:
            return failure or "another rank of this engine failed"
        for each, count in zip(changed, counts, strict=True):
            if count < each.entries:
                return f"{each.name}: {count} of {each.entries} entries were written"
        return None

    def _out_of_turn(self, envelope: DeltaHeader) -> str | None:
        """Why this message cannot be the next one."""
        told = f"message {envelope.index} of policy {envelope.version}"
        if envelope.index:
            expected = (envelope.version, envelope.base, envelope.index)
            return None if self._open == expected else f"{told} is out of turn: the one before it was not taken"
        if envelope.base is not None and envelope.base != self.held:
            holds = "no full push" if self.held is None else f"policy {self.held}"
            return f"{told} holds changes of policy {envelope.base}, but this engine holds {holds}"
        return None

    def _advance(self, envelope: DeltaHeader) -> None:
        if envelope.index + 1 == envelope.messages:
            self.held = envelope.version
        else:
            self._open = envelope.version, envelope.base, envelope.index + 1

    def _forget(self) -> None:
        self.held, self._open = None, None


def sparse(
    changed: Sequence[SparseTensorMeta], entries: Sequence[Tensor | None], hits: Sequence[list[int]]
) -> Iterator[tuple[str, SparseTensor]]:
    """The changed tensors of a message, each with its entries."""
    blocks, low, values = entries
    if blocks is None or low is None or values is None:
        return
    block_at = entry_at = 0
    for each, seen in zip(changed, hits, strict=True):
        counts = blocks[block_at : block_at + each.blocks].long()
        own = slice(entry_at, entry_at + each.entries)
        starts = torch.arange(each.blocks, device=low.device) * BLOCK_ITEMS
        position = torch.repeat_interleave(starts, counts, output_size=each.entries) + (low[own].long() & LOW_MASK)
        layout = torch.empty(each.shape, dtype=values.dtype, device="meta")
        yield each.name, SparseTensor(layout, position, values[own], seen)
        block_at, entry_at = block_at + each.blocks, entry_at + each.entries


def over_ranks(counts: list[int]) -> list[int]:
    """Sums over the tensor-parallel ranks of this engine; a collective."""
    from sglang.srt.distributed.parallel_state import get_tp_group

    group, summed = get_tp_group(), torch.tensor(counts, dtype=torch.int64)
    if group.world_size > 1:
        dist.all_reduce(summed, group=group.cpu_group)
    return summed.tolist()
