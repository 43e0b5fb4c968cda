"""A bucket as SGLang's `/update_weights_from_tensor` takes it: a handle to memory that both processes can map.

The format is that of SGLang's `MultiprocessingSerializer` with `load_format=flattened_bucket`: base64 of a pickle
written by multiprocessing's reducers. We do not import SGLang for it, which would cost a trainer rank seconds and
memory: the server reads the entries of `metadata` by attribute, and its unpickler allows `types.SimpleNamespace`. We
write such pickles and never load one.
"""

import base64
import io
import secrets
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor
from torch.multiprocessing import reductions

from app.utils.process import SHARED_MEMORY, run_prefix
from app.weight_sync.buckets import Bucket

CUDA_DEVICE_ARGUMENT = 6  # of `rebuild_cuda_tensor`


def allocate_shared(size: int, device: torch.device) -> Tensor:
    """Allocate `size` zeroed bytes that other processes can open by a handle."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=torch.uint8, device=device)
    # Shared from the start: `share_memory_` would copy. A file of ours, which torch enlarges, has the run's name.
    name = run_prefix() + secrets.token_hex(8)
    (SHARED_MEMORY / name).touch(mode=0o600, exist_ok=False)
    storage = torch.UntypedStorage._new_shared_filename_cpu(b"", f"/{name}".encode(), size)
    return torch.empty(0, dtype=torch.uint8).set_(storage).zero_()


def shared_memory_name(buffer: Tensor) -> str:
    """Return the name of a CPU buffer's shared memory."""
    _, name, _ = buffer.untyped_storage()._share_filename_cpu_()
    return name.decode().lstrip("/")


def serialize_bucket(buffer: Tensor, bucket: Bucket) -> str:
    """Return the payload of a bucket for one engine rank: a handle counts its readers.

    `buffer`: from `allocate_shared`; begins with the bucket's bytes.
    """
    content = flattened(buffer, bucket)
    if buffer.device.type == "cuda":
        content["flattened_tensor"] = _TensorByUuid(content["flattened_tensor"])

    pickled = io.BytesIO()
    # CPU memory as a named file: file descriptors can only be passed between related processes.
    before = multiprocessing.get_sharing_strategy()
    multiprocessing.set_sharing_strategy("file_system")
    try:
        ForkingPickler(pickled).dump(content)
    finally:
        multiprocessing.set_sharing_strategy(before)
    return base64.b64encode(pickled.getvalue()).decode()


def flattened(buffer: Tensor, bucket: Bucket) -> dict[str, Any]:
    """Return what SGLang expects in a payload of `load_format=flattened_bucket`."""
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
    return {"flattened_tensor": buffer[: bucket.bytes], "metadata": metadata}


class _TensorByUuid:
    """A CUDA tensor whose handle names the device by UUID: the two processes may number the devices differently."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild, arguments = reductions.reduce_tensor(self.tensor)
        by_uuid = list(arguments)
        by_uuid[CUDA_DEVICE_ARGUMENT] = str(torch.cuda.get_device_properties(self.tensor.device).uuid)
        return rebuild, tuple(by_uuid)
