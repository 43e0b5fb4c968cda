"""Copies in host memory: of a checkpoint's tensors, and of what a device has no room for.

A direct copy to pageable memory goes through the driver's own staging, at a fraction of the bus's bandwidth. Here, one
pinned buffer is filled by the device while another one is emptied by the host.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from app.model.sharding import local_shard

STAGING_BYTES = 64 * 2**20  # of each of two buffers
SMALL_BYTES = 2**16  # below, a direct copy is as fast
# torch rounds pinned allocations up to a power of two; allocating in chunks bounds the waste.
CHUNK_BYTES = 256 * 1024 * 1024


class HostCopier:
    """Copies local tensors of one device to host memory.

    Example::

        copy = HostCopier(torch.device("cuda:0"))
        copy(parameter)  # host tensor of the same shape and dtype
    """

    def __init__(self, device: torch.device, *, staging_bytes: int = STAGING_BYTES):
        self._device = device
        self._staging_bytes = staging_bytes
        self._buffers: list[Tensor] = []  # kept: pinning memory is slow

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return a copy. It is complete when this returns."""
        source = tensor.detach()
        copy = torch.empty(source.shape, dtype=source.dtype)
        if source.device.type == "cpu" or source.nbytes < SMALL_BYTES:
            return copy.copy_(source)

        if not self._buffers:
            self._buffers = [torch.empty(self._staging_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]

        def finish(event: Any, buffer: Tensor, destination: Tensor) -> None:
            event.synchronize()
            destination.copy_(buffer)

        # The device fills one buffer while the host empties the other.
        pending: tuple[Any, Tensor, Tensor] | None = None  # event, buffer, destination
        size = self._staging_bytes
        parts = zip(_bytes(source.contiguous()).split(size), _bytes(copy).split(size), strict=True)
        for index, (part, destination) in enumerate(parts):
            buffer = self._buffers[index % 2][: part.numel()]
            buffer.copy_(part, non_blocking=True)
            event = torch.get_device_module(self._device).Event()
            event.record()

            if pending is not None:
                finish(*pending)
            pending = event, buffer, destination
        if pending is not None:
            finish(*pending)
        return copy


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


class HostCopy:
    """Bytes of device storages in host memory: one storage after the other, in chunks of `CHUNK_BYTES`."""

    def __init__(self, storages: Sequence[torch.UntypedStorage], *, pin: bool):
        self._storages = {storage._cdata: storage for storage in storages}
        self._sizes = {key: storage.nbytes() for key, storage in self._storages.items()}
        starts = accumulate(self._sizes.values(), initial=0)
        self._starts = dict(zip(self._sizes, starts, strict=False))
        self.bytes = sum(self._sizes.values())
        sizes = [min(CHUNK_BYTES, self.bytes - start) for start in range(0, self.bytes, CHUNK_BYTES)]
        self._chunks = [torch.empty(size, dtype=torch.uint8, pin_memory=pin) for size in sizes]

    def fits(self, storages: Sequence[torch.UntypedStorage]) -> bool:
        return self._sizes == {storage._cdata: storage.nbytes() for storage in storages}

    def copy_from_device(self) -> None:
        """Copy all storages to the host. Asynchronous: synchronize the device afterwards."""
        for key, storage in self._storages.items():
            for host, device in self._pair_chunks(key, _bytes_of(storage)):
                host.copy_(device, non_blocking=True)

    def copy_to_device(self, allocate: Callable[[torch.UntypedStorage, int], None]) -> None:
        """Copy all storages back after `allocate` gave each its bytes. Asynchronous, as above."""
        for key, storage in self._storages.items():
            allocate(storage, self._sizes[key])
            for host, device in self._pair_chunks(key, _bytes_of(storage)):
                device.copy_(host, non_blocking=True)

    def contains(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._storages

    def read(self, tensor: Tensor) -> Tensor:
        """Return the content of a contained tensor as a new host tensor."""
        key = tensor.untyped_storage()._cdata
        content = torch.empty(self._sizes[key], dtype=torch.uint8)
        for host, out in self._pair_chunks(key, content):
            out.copy_(host)
        view = torch.empty(0, dtype=tensor.dtype)
        view.set_(content.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        return view.contiguous()

    def _pair_chunks(self, key: int, content: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (host bytes, the same bytes of `content`) until all of a storage is covered."""
        done = 0
        while done < content.numel():
            chunk, offset = divmod(self._starts[key] + done, CHUNK_BYTES)
            length = min(CHUNK_BYTES - offset, content.numel() - done)
            yield self._chunks[chunk][offset : offset + length], content[done : done + length]
            done += length


class HostTensors:
    """Keeps tensors of a device in host memory while they are not used. They keep their identity without storage.

    Example::

        host.offload(moments)  # their storages are empty
        host.onload()          # as before
    """

    def __init__(self, device: torch.device):
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        self._copy: HostCopy | None = None  # kept while the tensors are on the device: pinning memory is slow
        self._offloaded = False

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Move tensors to the host and free their storages on the device."""
        storages = storages_of(tensors)
        if self._copy is None or not self._copy.fits(storages):
            self._copy = None  # freed before the next one is pinned
            self._copy = HostCopy(storages, pin=self._module is not None)
        self._copy.copy_from_device()
        if self._module is not None:
            self._module.synchronize()
        for storage in storages:
            storage.resize_(0)
        self._offloaded = True

    def onload(self) -> None:
        """Move offloaded tensors back, in the order of the device's work. No-op without any."""
        if self._copy is not None and self._offloaded:
            self._copy.copy_to_device(torch.UntypedStorage.resize_)
            self._offloaded = False

    def read(self, tensor: Tensor) -> Tensor | None:
        """Return a host copy of an offloaded tensor; None for another one."""
        offloaded = self._copy is not None and self._offloaded and self._copy.contains(tensor)
        return self._copy.read(tensor) if self._copy is not None and offloaded else None


def storages_of(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Return the storages of local tensors, each once: tied parameters share theirs."""
    storages = (local_shard(tensor).untyped_storage() for tensor in tensors)
    return list({storage._cdata: storage for storage in storages}.values())


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Return a view of a storage, [bytes] uint8."""
    view = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return view.set_(storage, 0, (storage.nbytes(),), (1,))
