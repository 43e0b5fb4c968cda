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
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from app.errors import TrainerError
from app.model.parallelize import reshard
from app.trainer.host_state import HostCopy, storages_of
from app.types import TrainerMemory

if TYPE_CHECKING:
    from app.trainer.rank import TrainerRank

log = logging.getLogger(__name__)
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
        storages = storages_of(self._tensors(region))
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
            on_host = rank.optimizer.host is not None  # all but the counters of steps
            yield from (value for _, slot, value in rank.optimizer.state() if not on_host or slot == "step")
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
