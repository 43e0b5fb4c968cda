"""The trainer's memory while the engine generates: copied to the host and freed on the device, a part at a time.

    offload   device storages → pinned host memory, then the storages are shrunk to nothing
    onload    waits until the device has room → the storages grow again → copied back

Always holds: tensors keep their identity, since only their storage comes and goes, so that FSDP2, the optimizer and the
weight sync need not know; a part is on the device or away, and taking away what is away is an error here. Where trainer
and engine do not fill the same memory (on a CPU) nothing is moved, and the order of calls is checked all the same.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from app.errors import TrainerError
from app.trainer.checkpoint_state import host_copy
from app.types import TrainerMemory

if TYPE_CHECKING:
    from app.trainer.rank import TrainerRank

log = logging.getLogger(__name__)
PIECE_BYTES = 256 * 1024 * 1024  # torch rounds pinned memory up to a power of two: many pieces waste little
ROOM_SECONDS = 60.0  # an engine's release may return before the device has the memory
POLL_SECONDS = 0.05


class Offload:
    """Attached to every trainer rank as part `offload`. `moves`: whether anything is gained by it on this device."""

    def __init__(self, host: "TrainerRank", *, moves: bool):
        self.host, self.moves = host, moves
        self._copies: dict[TrainerMemory, HostCopy] = {}  # kept while the part is on the device: pinning takes long

    def offload(self, part: TrainerMemory) -> None:
        """Free this part's device memory; what it held survives on the host."""
        if part in self.host.offloaded:
            raise TrainerError(f"trainer rank {self.host.rank}: {part.name} is offloaded already")
        if self.host.step.open:
            raise TrainerError(f"trainer rank {self.host.rank}: {part.name} cannot be offloaded while a step is open")
        if self.moves:
            with self._told("offloaded", part):
                self._take_away(part)
        self.host.offloaded.add(part)

    def onload(self, part: TrainerMemory) -> None:
        """Bring a part back; one that is there stays."""
        if part in self.host.offloaded:
            if self.moves:
                with self._told("onloaded", part):
                    self._bring_back(part)
            self.host.offloaded.discard(part)

    def copy(self, tensor: Tensor) -> Tensor:
        """A local tensor's copy in host memory, wherever it is; for a checkpoint."""
        for part in self.host.offloaded & self._copies.keys():
            if self._copies[part].holds(tensor):
                return self._copies[part].tensor(tensor)
        return host_copy(tensor)

    # --- inside

    def _take_away(self, part: TrainerMemory) -> None:
        for model in (self.host.model, self.host.reference):
            if model is not None:
                self.host.state.reshard(model)
        if part is TrainerMemory.gradients:  # between steps there are none worth keeping
            self.host.optimizer.zero_grad()
        storages = _storages(self._tensors(part))
        kept = self._copies.get(part)
        if kept is None or not kept.fits(storages):  # the optimizer has its state only after the first update
            self._copies[part] = kept = HostCopy(storages, pin=self._module is not None)
        kept.take()
        if self._module is not None:
            self._module.synchronize(self.host.torch_device)
        for storage in storages:
            self._free(storage)
        if self._module is not None:
            self._module.empty_cache()

    def _bring_back(self, part: TrainerMemory) -> None:
        kept = self._copies[part]
        self._wait_for_room(part, kept.bytes)
        kept.give_back(self._regrow)
        if self._module is not None:
            self._module.synchronize(self.host.torch_device)

    @contextmanager
    def _told(self, done: str, part: TrainerMemory) -> Iterator[None]:
        started = time.perf_counter()
        yield
        seconds, mib = time.perf_counter() - started, self._copies[part].bytes / 2**20
        log.info("%s %s: %.1f MiB in %.3f s", done, part.name, mib, seconds)

    def _free(self, storage: torch.UntypedStorage) -> None:
        storage.resize_(0)

    def _regrow(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        storage.resize_(nbytes)

    def _tensors(self, part: TrainerMemory) -> Iterator[Tensor]:
        """What a part consists of; the frozen reference leaves with the optimizer, for a push needs neither."""
        host = self.host
        if part is TrainerMemory.parameters:
            yield from (*host.model.parameters(), *host.model.buffers())
        elif part is TrainerMemory.optimizer:
            yield from (value for _, _, value in host.optimizer.state())
            if host.reference is not None:
                yield from (*host.reference.parameters(), *host.reference.buffers())

    @property
    def _module(self) -> Any:
        """torch's module of the device; None on a CPU."""
        kind = self.host.torch_device.type
        return None if kind == "cpu" else torch.get_device_module(kind)

    def _wait_for_room(self, part: TrainerMemory, needed: int) -> None:
        """Until the device has as much free memory as the part takes; another process gives it back when it likes."""
        if self._module is None:
            return
        deadline = time.monotonic() + ROOM_SECONDS
        while (free := self._module.mem_get_info(self.host.torch_device)[0]) < needed:
            if time.monotonic() > deadline:
                raise TrainerError(
                    f"trainer rank {self.host.rank}: onload of {part.name} needs {needed / 2**30:.1f} GiB on "
                    f"{self.host.torch_device}, of which {free / 2**30:.1f} GiB were free after {ROOM_SECONDS:.0f} s: "
                    "the engine beside it holds more than its release should leave"
                )
            time.sleep(POLL_SECONDS)


class HostCopy:
    """The bytes of some storages in host memory, one storage behind the other, in pieces of `PIECE_BYTES`."""

    def __init__(self, storages: Sequence[torch.UntypedStorage], *, pin: bool):
        self._storages = {storage._cdata: storage for storage in storages}
        self._sizes = {key: storage.nbytes() for key, storage in self._storages.items()}
        starts = accumulate(self._sizes.values(), initial=0)
        self._starts = dict(zip(self._sizes, starts, strict=False))
        self.bytes = sum(self._sizes.values())
        sizes = [min(PIECE_BYTES, self.bytes - start) for start in range(0, self.bytes, PIECE_BYTES)]
        self._pieces = [torch.empty(size, dtype=torch.uint8, pin_memory=pin) for size in sizes]

    def fits(self, storages: Sequence[torch.UntypedStorage]) -> bool:
        """Whether it was made for these."""
        return self._sizes == {storage._cdata: storage.nbytes() for storage in storages}

    def take(self) -> None:
        """Device → host; not waited for."""
        for key, storage in self._storages.items():
            for room, there in self._meet(key, _bytes_of(storage)):
                room.copy_(there, non_blocking=True)

    def give_back(self, regrow: Callable[[torch.UntypedStorage, int], None]) -> None:
        """Host → device, into storages that `regrow` gives their size again; not waited for."""
        for key, storage in self._storages.items():
            regrow(storage, self._sizes[key])
            for room, there in self._meet(key, _bytes_of(storage)):
                there.copy_(room, non_blocking=True)

    def holds(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._storages

    def tensor(self, tensor: Tensor) -> Tensor:
        """What this tensor held when it was taken, as a tensor of its own."""
        key = tensor.untyped_storage()._cdata
        whole = torch.empty(self._sizes[key], dtype=torch.uint8)
        for room, there in self._meet(key, whole):
            there.copy_(room)
        view = torch.empty(0, dtype=tensor.dtype)
        view.set_(whole.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        return view.contiguous()

    def _meet(self, key: int, whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(a stretch of the host's bytes, the same stretch of `whole`) of one storage."""
        start, done = self._starts[key], 0
        while done < whole.numel():
            piece, at = divmod(start + done, PIECE_BYTES)
            length = min(PIECE_BYTES - at, whole.numel() - done)
            yield self._pieces[piece][at : at + length], whole[done : done + length]
            done += length


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Each storage once; parameters that are tied share theirs."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    found = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in local}
    return list(found.values())


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """A view of a storage as bytes."""
    view = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return view.set_(storage, 0, (storage.nbytes(),), (1,))
