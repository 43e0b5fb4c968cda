"""Runs inside SGLang's processes: a CPU keeps the memory that weight syncs go through.

SGLang allocates a buffer for each broadcast bucket and maps each bucket of shared memory anew. Touching fresh pages
takes longer than receiving or copying the bytes: 0.4 s of a sync of 1.2 GB for the buffers, 0.06 s for the mappings.

Invariants:
    - At most one buffer of the largest bucket, and mappings of as many buffers as a sender has, are kept.
    - The kept mappings are our own. Those of torch count a file's readers, and closing the last one aborts the process
      if the sender has removed the file.
    - A loader copies what it loads: with transport `ipc` the trainer overwrites a loaded bucket as well.
"""

import mmap
import os
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from app.rollout.sglang_plugin.delta_loader import UPDATER
from app.utils.process import SHARED_MEMORY

SENDER_BUFFERS = 2  # `BUFFERS` of app/weight_sync/sender.py


def register() -> None:
    """Register the hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    buffers = WeightBuffers()
    HookRegistry.register(f"{UPDATER}._receive_bucketed_weights_from_distributed", buffers.receive, HookType.REPLACE)
    HookRegistry.register(f"{UPDATER}.update_weights_from_tensor", buffers.keep_mapping, HookType.BEFORE)


class WeightBuffers:
    """The kept memory of one scheduler process."""

    def __init__(self) -> None:
        self._received: Tensor | None = None
        self._mapped: dict[tuple[str, int], Tensor] = {}  # whole files, by name and inode; the latest one last

    def receive(
        self,
        updater: Any,
        *,
        names: Sequence[str],
        dtypes: Sequence[str | torch.dtype],
        shapes: Sequence[Sequence[int]],
        group_name: str,
    ) -> list[tuple[str, Tensor]]:
        """Receive a flattened bucket; return its tensors, views that the next bucket overwrites."""
        types = [getattr(torch, dtype) if isinstance(dtype, str) else dtype for dtype in dtypes]
        sizes = [prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, types, strict=True)]

        # a failed broadcast may still be writing into its buffer: only a successful one is kept
        flat, self._received = self._buffer(sum(sizes)), None
        dist.broadcast(flat[: sum(sizes)], src=0, group=updater._model_update_group[group_name])
        self._received = flat
        return list(zip(names, _views(flat, sizes, types, shapes), strict=True))

    def keep_mapping(
        self, updater: Any, named_tensors: Any, load_format: str | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Load a flattened bucket from a mapping that is kept. Hook before it is loaded."""
        if load_format == "flattened_bucket":
            flat = self._kept_mapping(named_tensors["flattened_tensor"])
            named_tensors = {**named_tensors, "flattened_tensor": flat}
        return (updater,), {"named_tensors": named_tensors, "load_format": load_format}

    def _kept_mapping(self, flat: Tensor) -> Tensor:
        """Return the same bytes of the same file by our own mapping. `flat`: a shared tensor, mapped by torch."""
        storage = flat.untyped_storage()
        name = storage._share_filename_cpu_()[1].decode().lstrip("/")
        with (SHARED_MEMORY / name).open("r+b") as file:
            found = os.fstat(file.fileno())
            key = (name, found.st_ino)
            whole = self._mapped.pop(key, None)
            if whole is None:
                whole = torch.frombuffer(mmap.mmap(file.fileno(), found.st_size), dtype=torch.uint8)

        # removed files hold their memory until they are unmapped
        others = {kept: each for kept, each in self._mapped.items() if (SHARED_MEMORY / kept[0]).exists()}
        self._mapped = dict([*others.items(), (key, whole)][-SENDER_BUFFERS:])

        start = found.st_size - storage.nbytes() + flat.storage_offset()  # after torch's own header
        return whole[start : start + flat.numel()]

    def _buffer(self, size: int) -> Tensor:
        if self._received is None or self._received.numel() < size:
            self._received = None  # freed before the larger one is allocated
            return torch.empty(size, dtype=torch.uint8)
        return self._received


def _views(
    flat: Tensor, sizes: Sequence[int], types: Sequence[torch.dtype], shapes: Sequence[Sequence[int]]
) -> Iterator[Tensor]:
    start = 0
    for size, dtype, shape in zip(sizes, types, shapes, strict=True):
        yield flat[start : start + size].view(dtype).view(tuple(shape))
        start += size
