"""Trainer memory offload: while the engine generates, tensors are staged in host memory and freed on the device.

    offload   device storages → pinned host memory → storages shrink to 0 bytes
    onload    wait for free device memory → storages grow to their size → copied back

Invariants:
- Tensors keep their identity; only their storage comes and goes. FSDP2, the optimizer and the weight sync need no
  change.
- A region is either on the device or offloaded. Offloading it twice is an error; onloading it twice is not.
- Where trainer and engine do not share one memory (on a CPU) nothing moves, but the order of calls is still checked.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from app.errors import TrainerError
from app.model.sharding import local_shard
from app.trainer.checkpoint_state import reshard
from app.types import TrainerMemory

if TYPE_CHECKING:
    from app.trainer.rank import TrainerRank

log = logging.getLogger(__name__)
# torch rounds pinned allocations up to a power of two; allocating in chunks bounds the waste.
CHUNK_BYTES = 256 * 1024 * 1024
# An engine's release may return before the device has the memory back.
FREE_MEMORY_TIMEOUT_S = 60.0
POLL_INTERVAL_S = 0.05


class Offload:
    """Memory offload of one trainer rank, its extension `OFFLOAD`."""

    def __init__(self, rank: "TrainerRank", *, moves: bool):
        self.rank = rank
        self.moves = moves  # False on devices where trainer and engine do not share memory
        # Kept while a region is on the device: pinning memory is slow.
        self._copies: dict[TrainerMemory, HostCopy] = {}

    def offload(self, region: TrainerMemory) -> None:
        """Move a region to host memory. Raises `TrainerError` if it is there already, or a step is open."""
        if region in self.rank.offloaded:
            raise TrainerError(f"trainer rank {self.rank.rank}: {region.name} is offloaded already")
        if self.rank.step.open:
            raise TrainerError(f"trainer rank {self.rank.rank}: {region.name} cannot be offloaded while a step is open")

        if self.moves:
            with self._logged("offloaded", region):
                self._move_to_host(region)
        self.rank.offloaded.add(region)

    def onload(self, region: TrainerMemory) -> None:
        """Move a region back to the device. Idempotent. Raises `TrainerError` if memory does not get free in time."""
        if region not in self.rank.offloaded:
            return
        if self.moves:
            with self._logged("onloaded", region):
                copy = self._copies[region]
                self._wait_for_free_memory(region, copy.bytes)
                copy.copy_to_device(self._allocate)
                self._synchronize()
        self.rank.offloaded.discard(region)

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy of a local tensor in host memory, whether it is offloaded or not."""
        for region in self.rank.offloaded & self._copies.keys():
            if self._copies[region].contains(tensor):
                return self._copies[region].read(tensor)
        return self.rank.state.host_copy(tensor)

    # --- inside

    def _move_to_host(self, region: TrainerMemory) -> None:
        # Parameters that a forward gathered would stay on the device.
        for model in (self.rank.model, self.rank.reference):
            if model is not None:
                reshard(model)

        # Gradients are not kept between steps.
        if region is TrainerMemory.gradients:
            self.rank.optimizer.zero_grad()

        # The optimizer has its state only after the first update.
        storages = _storages(self._tensors(region))
        copy = self._copies.get(region)
        if copy is None or not copy.fits(storages):
            if copy is not None:
                del copy, self._copies[region]
                self._free_pinned_memory()
            copy = HostCopy(storages, pin=self._device_module is not None)
            self._copies[region] = copy

        copy.copy_from_device()
        self._synchronize()
        for storage in storages:
            self._free(storage)
        # torch's allocator keeps freed blocks for itself; the engine needs them.
        if self._device_module is not None:
            self._device_module.empty_cache()

    def _free_pinned_memory(self) -> None:
        """Return the pinned memory of a dropped copy to the machine: torch would keep it for copies of its size."""
        module = self._device_module
        # torch_npu's name, then torch's from 2.12 on
        free = getattr(module, "host_empty_cache", None) or getattr(torch.accelerator, "empty_host_cache", None)
        if module is not None and free is not None:
            free()

    def _free(self, storage: torch.UntypedStorage) -> None:
        storage.resize_(0)

    def _allocate(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        storage.resize_(nbytes)

    def _tensors(self, region: TrainerMemory) -> Iterator[Tensor]:
        """Yield a region's tensors. The reference moves with the optimizer: a weight sync needs neither."""
        rank = self.rank
        if region is TrainerMemory.parameters:
            yield from (*rank.model.parameters(), *rank.model.buffers())
        elif region is TrainerMemory.optimizer:
            yield from (value for _, _, value in rank.optimizer.state())
            if rank.reference is not None:
                yield from (*rank.reference.parameters(), *rank.reference.buffers())

    @property
    def _device_module(self) -> Any:
        """torch's module of the device; None on a CPU."""
        kind = self.rank.torch_device.type
        return None if kind == "cpu" else torch.get_device_module(kind)

    def _synchronize(self) -> None:
        if self._device_module is not None:
            self._device_module.synchronize(self.rank.torch_device)

    def _wait_for_free_memory(self, region: TrainerMemory, needed: int) -> None:
        """Wait until the device has this many free bytes. The engine's process frees them asynchronously."""
        if self._device_module is None:
            return
        deadline = time.monotonic() + FREE_MEMORY_TIMEOUT_S
        while (free := self._device_module.mem_get_info(self.rank.torch_device)[0]) < needed:
            if time.monotonic() > deadline:
                raise TrainerError(
                    f"trainer rank {self.rank.rank}: onload of {region.name} needs {needed / 2**30:.1f} GiB on "
                    f"{self.rank.torch_device}, but only {free / 2**30:.1f} GiB were free after "
                    f"{FREE_MEMORY_TIMEOUT_S:.0f} s: the engine on this device did not release enough memory"
                )
            time.sleep(POLL_INTERVAL_S)

    @contextmanager
    def _logged(self, done: str, region: TrainerMemory) -> Iterator[None]:
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        log.info("%s %s: %.1f MiB in %.3f s", done, region.name, self._copies[region].bytes / 2**20, seconds)


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


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Return the storages of local tensors, each once: tied parameters share theirs."""
    storages = (local_shard(tensor).untyped_storage() for tensor in tensors)
    return list({storage._cdata: storage for storage in storages}.values())


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Return a view of a storage, [bytes] uint8."""
    view = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return view.set_(storage, 0, (storage.nbytes(),), (1,))
