"""What a checkpoint holds of the ranks: copied to the host in one moment, written to disk while training goes on.

    capture   shards → host memory (training waits)
    write     host memory → files (training goes on)
    restore   files → shards

Always holds: tensors carry the source checkpoint's names, and torch.distributed.checkpoint cuts them, so that another
number of ranks can read them; what is written is what was captured, whatever the parameters have become since. The
background write has a process group of its own: its collectives would mix with training's. The idea is TorchTitan's.
"""

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from app.errors import CheckpointError
from app.model.policy import PolicyModel, named_checkpoint_tensors
from app.trainer import rng_state as random_state
from app.trainer.optimizer import Optimizer

log = logging.getLogger(__name__)

MODEL, OPTIMIZER, RANDOM, SCHEDULE = "model.", "optimizer.", "random.", "schedule."
UNREADABLE = (OSError, EOFError, UnpicklingError, ValueError, KeyError, AttributeError, ImportError, IndexError)
READ_BYTES = 2**30  # of tensors that an export holds at once
SHOWN = 3  # tensor names in a sentence


def host_copy(tensor: Tensor) -> Tensor:
    """A copy of a local tensor in host memory."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())


class RankState:
    """One rank's part of a checkpoint; every rank makes the same calls in the same order, all of them between steps."""

    def __init__(self, model: PolicyModel, optimizer: Optimizer, device: torch.device, *, timeout_s: float):
        self.model, self.optimizer, self.device = model, optimizer, device
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self._captured: dict[str, Tensor] | None = None
        self._group: dist.ProcessGroup | None = None
        if dist.is_initialized():
            shard = next(each for each in model.parameters() if isinstance(each, DTensor))
            self._mesh = init_device_mesh("cpu", tuple(shard.device_mesh.shape))
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    @property
    def bytes(self) -> int:
        """Bytes of this rank's part once the optimizer has its state."""
        copies = 1 + sum(slot != "step" for slot in self.optimizer.slots)
        return copies * sum(_local(tensor).nbytes for tensor in self._parameters().values())

    def capture(self, copy: Callable[[Tensor], Tensor] = host_copy) -> int:
        """Copy this rank's part to host memory with `copy` and return its bytes."""
        self.reshard(self.model)
        parameters = self._parameters()
        names = {parameter: name for name, parameter in parameters.items()}
        found = {MODEL + name: parameter for name, parameter in parameters.items()}
        found |= {f"{OPTIMIZER}{slot}.{names[each]}": value for each, slot, value in self.optimizer.state()}
        captured = {key: self._on_host(tensor, copy) for key, tensor in found.items()}
        captured[self._schedule] = torch.tensor([self.optimizer.updates, self.optimizer.skipped_in_a_row])
        captured[f"{RANDOM}{self.rank}"] = random_state.read(self.device)
        self._captured = captured
        return sum(_local(tensor).nbytes for tensor in captured.values())

    def write(self, folder: Path) -> None:
        """Write what was captured; its files are on the disk when this returns. May run beside training."""
        captured, self._captured = self._captured, None
        if captured is None:
            raise CheckpointError(f"checkpoint {folder}: nothing was captured to be written")
        writer = dcp.FileSystemWriter(folder, per_thread_copy_ahead=0)  # there is no device to copy from
        with _explained(folder, "written"):
            dcp.save(captured, storage_writer=writer, process_group=self._group, no_dist=self._group is None)

    def restore(self, folder: Path) -> None:
        """Take over a checkpoint's parameters, optimizer, schedule and random numbers. Nothing may be offloaded."""
        self.reshard(self.model)
        saved = _saved(folder)
        parameters = self._parameters()
        self._require_same(saved, folder)
        target = {MODEL + name: parameter.detach() for name, parameter in parameters.items()}
        target[self._schedule] = torch.zeros(2, dtype=torch.int64)
        kept: dict[Tensor, dict[str, Tensor]] = {}
        for key, slot, name in _slots(saved):
            kept.setdefault(parameters[name], {})[slot] = target[key] = _empty(saved[key], parameters[name])
        mine = f"{RANDOM}{self.rank}"
        if mine in saved:  # a further rank goes on with the numbers of its seed
            target[mine] = torch.zeros(saved[mine].size, dtype=torch.uint8)
        reader = dcp.FileSystemReader(folder)
        with _explained(folder, "read"):
            dcp.load(target, storage_reader=reader, process_group=self._group, no_dist=self._group is None)
        updates, skipped = target[self._schedule].tolist()
        self.optimizer.restore(kept, updates=updates, skipped_in_a_row=skipped)
        if mine in target:
            random_state.write(target[mine], self.device)

    # --- inside

    @property
    def _schedule(self) -> str:
        return SCHEDULE + self.optimizer.config.optimizer.name

    def _parameters(self) -> dict[str, Tensor]:
        return dict(named_checkpoint_tensors(self.model))

    @staticmethod
    def reshard(model: nn.Module) -> None:
        """A forward without a backward leaves the root's parameters gathered; shards are what is saved and moved."""
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _on_host(self, tensor: Tensor, copy: Callable[[Tensor], Tensor]) -> Tensor:
        if not isinstance(tensor, DTensor):
            return copy(tensor)
        return DTensor.from_local(
            copy(tensor.to_local()),
            self._mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )

    def _require_same(self, saved: Mapping[str, Any], folder: Path) -> None:
        """Raise `CheckpointError` unless the checkpoint is of this model and of this kind of optimizer."""
        parameters = self._parameters()
        wanted = {MODEL + name: tuple(parameter.shape) for name, parameter in parameters.items()}
        there = {key: tuple(saved[key].size) for key in saved if key.startswith(MODEL)}
        differing = sorted(key for key in wanted.keys() | there.keys() if wanted.get(key) != there.get(key))
        if differing:
            told = ", ".join(
                f"{key.removeprefix(MODEL)} is {there.get(key, 'missing')} and not {wanted.get(key, 'in this model')}"
                for key in differing[:SHOWN]
            )
            raise CheckpointError(f"checkpoint {folder} is of another model: {told}")
        if self._schedule not in saved:
            name = self.optimizer.config.optimizer.name
            raise CheckpointError(f"checkpoint {folder} was made with another optimizer than trainer.optimizer={name}")


def weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """(source checkpoint's name, tensor on the host) of a checkpoint, some at a time, by a single process."""
    batch: dict[str, Tensor] = {}
    for key, stored in _saved(folder).items():
        if key.startswith(MODEL):
            batch[key] = torch.empty(stored.size, dtype=stored.properties.dtype)
            if sum(tensor.nbytes for tensor in batch.values()) >= READ_BYTES:
                yield from _read(folder, batch)
                batch = {}
    yield from _read(folder, batch)


def _read(folder: Path, batch: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # it is meant to be
    with _explained(folder, "read"):
        dcp.load(batch, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    yield from ((key.removeprefix(MODEL), tensor) for key, tensor in batch.items())


def _saved(folder: Path) -> dict[str, Any]:
    """What torch.distributed.checkpoint says of every tensor, by key."""
    try:
        return dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    except UNREADABLE as error:
        raise CheckpointError(f"checkpoint {folder} cannot be read: {line(error)}") from error


def _slots(saved: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(key, slot, parameter's name) of the optimizer's tensors."""
    for key in saved:
        if key.startswith(OPTIMIZER):
            slot, _, name = key.removeprefix(OPTIMIZER).partition(".")
            yield key, slot, name


def _empty(saved: Any, parameter: Tensor) -> Tensor:
    """Where a tensor of the optimizer is read into: cut like its parameter, or a single number."""
    if saved.size == parameter.shape:
        return torch.zeros_like(parameter.detach())
    return torch.zeros(saved.size, dtype=saved.properties.dtype)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextlib.contextmanager
def _explained(folder: Path, what: str) -> Iterator[None]:
    """The first rank's failure in one sentence; the stacks of all are in this rank's log."""
    try:
        yield
    except CheckpointException as failure:  # not an `Exception`: it would end the actor
        log.error("%s", failure)
        rank, (error, _) = min(failure.failures.items())
        raise CheckpointError(
            f"checkpoint {folder} could not be {what} by trainer rank {rank}: {line(error)}"
        ) from None


def line(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0]
