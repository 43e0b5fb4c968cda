"""A bucket as SGLang's `/update_weights_from_tensor` takes it: a handle of memory that both processes can see.

The format is that of SGLang's `MultiprocessingSerializer` with `load_format=flattened_bucket`: base64 of a pickle that
multiprocessing's reducers wrote. Importing SGLang for it would cost a trainer rank seconds and memory, and is not
needed: the server reads the entries of `metadata` by attribute, and `types.SimpleNamespace` is on the list of classes
that it unpickles. We only write such pickles; nothing is unpickled by us.
"""

import base64
import io
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor
from torch.multiprocessing import reductions

from app.weight_sync.buckets import Bucket

CUDA_DEVICE_ARGUMENT = 6  # of `rebuild_cuda_tensor`


def allocate(size: int, device: torch.device) -> Tensor:
    """`size` bytes that other processes can be given a handle of, every page of them touched."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=torch.uint8, device=device)
    # made where it will be shared: `share_memory_` would copy, and so need the room twice
    storage = torch.UntypedStorage._new_using_filename_cpu(size)
    return torch.empty(0, dtype=torch.uint8).set_(storage).zero_()


def file_of(buffer: Tensor) -> str:
    """The name of a CPU buffer's shared memory."""
    _, name, _ = buffer.untyped_storage()._share_filename_cpu_()
    return name.decode().lstrip("/")


def serialize(buffer: Tensor, bucket: Bucket) -> str:
    """The payload of a bucket in `buffer` (from `allocate`) for one engine rank.

    Each receiver needs a payload of its own, since a handle counts its readers.
    """
    flat = buffer[: bucket.bytes]
    metadata = [
        SimpleNamespace(
            name=tensor.name,
            shape=torch.Size(tensor.shape),
            dtype=getattr(torch, tensor.dtype),
            start_idx=start,
            end_idx=start + tensor.bytes,
            numel=tensor.bytes,
        )
        for tensor, start in zip(bucket.tensors, bucket.offsets, strict=True)
    ]
    written = io.BytesIO()
    with _by_name():
        handle = flat if flat.device.type != "cuda" else _ByUuid(flat)
        ForkingPickler(written).dump({"flattened_tensor": handle, "metadata": metadata})
    return base64.b64encode(written.getvalue()).decode()


class _ByUuid:
    """A CUDA tensor that names its card by UUID: the two processes may number the cards differently."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild, arguments = reductions.reduce_tensor(self.tensor)
        uuid = str(torch.cuda.get_device_properties(self.tensor.device).uuid)
        at = CUDA_DEVICE_ARGUMENT
        return rebuild, (*arguments[:at], uuid, *arguments[at + 1 :])


@contextmanager
def _by_name() -> Iterator[None]:
    """CPU memory is shared as a named file: file descriptors only travel between relatives."""
    before = multiprocessing.get_sharing_strategy()
    multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        multiprocessing.set_sharing_strategy(before)
