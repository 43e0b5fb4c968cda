"""A rank's share of a checkpoint: copied to the host between two updates, written to disk while training continues.

    capture   shards → host memory   training waits
    write     host memory → files    training continues
    restore   files → shards

Invariants:
- The parameters are those that training changes: with adapters, the base model is not part of a checkpoint.
- Tensors carry the names of the source checkpoint, adapters those of PEFT. torch.distributed.checkpoint shards them, so
  any number of ranks can restore what any other number wrote. Of replicas, it writes each shard once.
- `write` writes what `capture` copied, even if the parameters have changed since.
- The background write has its own process group: its collectives must not interleave with training's. The idea is
  TorchTitan's.
"""

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.tensor import DTensor

from app.errors import CheckpointError, one_line
from app.model.parallelize import replica_mesh, reshard
from app.model.policy import PolicyModel, named_trained_tensors
from app.model.sharding import local_shard, replicas
from app.trainer.host_state import HostCopier
from app.trainer.optimizer import PolicyOptimizer
from app.utils.files import ChecksumWriter

log = logging.getLogger(__name__)

# Prefixes of a checkpoint's keys.
MODEL, OPTIMIZER, SCHEDULE = "model.", "optimizer.", "schedule."
UNREADABLE = (OSError, EOFError, UnpicklingError, ValueError, KeyError, AttributeError, ImportError, IndexError)
READ_BYTES = 2**30  # of tensors that an export holds at once
MAX_NAMES = 3  # tensor names in an error


class RankState:
    """One rank's share of a checkpoint.

    All ranks make the same calls in the same order. `restore` needs a closed step, `capture` one without updates so
    far; `write` may run concurrently with steps.

    Example::

        state.capture()                           # between two steps
        threading.Thread(target=state.write, args=(folder,)).start()
        ...                                       # further steps
        state.restore(folder)                     # later, or in another run
    """

    def __init__(self, model: PolicyModel, optimizer: PolicyOptimizer, device: torch.device, *, timeout_s: float):
        self.model = model
        self.optimizer = optimizer
        self._copier = HostCopier(device)
        self._captured: dict[str, Tensor] | None = None
        self._process_group: dist.ProcessGroup | None = None
        if dist.is_initialized():
            shards = (parameter for parameter in model.parameters() if isinstance(parameter, DTensor))
            if (shard := next(shards, None)) is not None:
                self._host_mesh, _ = replica_mesh("cpu", dist.get_world_size(), replicas(shard))
            self._process_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def host_copy(self, tensor: Tensor) -> Tensor:
        """Return a copy of a local tensor in host memory. The optimizer's moments may be there already."""
        kept = None if self.optimizer.host is None else self.optimizer.host.read(tensor)
        return self._copier(tensor) if kept is None else kept

    @property
    def bytes(self) -> int:
        """Bytes of this rank's share, counting the optimizer's state as if it existed already."""
        copies = 1 + sum(slot != "step" for slot in self.optimizer.slots)
        return copies * sum(local_shard(tensor).nbytes for tensor in self._parameters().values())

    def capture(self, copy: Callable[[Tensor], Tensor] | None = None) -> int:
        """Copy this rank's share to host memory. Returns the bytes copied.

        `copy` copies a local tensor; memory offload passes one that can read offloaded tensors. None: `host_copy`.
        """
        reshard(self.model)
        parameters = self._parameters()
        names = {parameter: name for name, parameter in parameters.items()}
        tensors = {MODEL + name: parameter for name, parameter in parameters.items()}
        for parameter, slot, value in self.optimizer.state():
            tensors[f"{OPTIMIZER}{slot}.{names[parameter]}"] = value

        captured = {key: self._on_host(tensor, copy or self.host_copy) for key, tensor in tensors.items()}
        captured[self._schedule_key] = torch.tensor([self.optimizer.updates, self.optimizer.skipped_in_a_row])
        self._captured = captured
        return sum(local_shard(tensor).nbytes for tensor in captured.values())

    def write(self, folder: Path) -> dict[str, int]:
        """Write the captured state to disk. Returns the CRC-32 of each file that this rank wrote, by name."""
        captured, self._captured = self._captured, None
        if captured is None:
            raise CheckpointError(f"checkpoint {folder}: capture was not called before write")

        # The state is in host memory: there is nothing to copy ahead.
        writer = dcp.FileSystemWriter(folder, per_thread_copy_ahead=0)
        # The writer makes a file system of its own, without checksums.
        writer.fs = written = ChecksummedFiles()
        with _wrap_errors(folder, "written"):
            dcp.save(
                captured, storage_writer=writer, process_group=self._process_group, no_dist=self._process_group is None
            )
        return written.checksums

    def restore(self, folder: Path) -> None:
        """Load a checkpoint's parameters, optimizer and schedule. Nothing may be offloaded.

        Raises:
            CheckpointError: The checkpoint cannot be read, or is of another model or optimizer. In the latter two
                cases nothing has changed.
        """
        reshard(self.model)
        saved = _read_metadata(folder)
        self._require_same(saved, folder)

        parameters = self._parameters()
        target = {MODEL + name: parameter.detach() for name, parameter in parameters.items()}
        target[self._schedule_key] = torch.zeros(2, dtype=torch.int64)
        optimizer_state: dict[Tensor, dict[str, Tensor]] = {}
        for key in saved:
            if key.startswith(OPTIMIZER):
                slot, _, name = key.removeprefix(OPTIMIZER).partition(".")
                target[key] = _empty_slot(saved[key], parameters[name])
                optimizer_state.setdefault(parameters[name], {})[slot] = target[key]

        with _wrap_errors(folder, "read"):
            dcp.load(
                target,
                storage_reader=dcp.FileSystemReader(folder),
                process_group=self._process_group,
                no_dist=self._process_group is None,
            )
        updates, skipped = target[self._schedule_key].tolist()
        self.optimizer.restore(optimizer_state, updates=updates, skipped_in_a_row=skipped)

    @property
    def _schedule_key(self) -> str:
        return SCHEDULE + self.optimizer.config.optimizer.name

    def _parameters(self) -> dict[str, Tensor]:
        return dict(named_trained_tensors(self.model))

    def _on_host(self, tensor: Tensor, copy: Callable[[Tensor], Tensor]) -> Tensor:
        if not isinstance(tensor, DTensor):
            return copy(tensor)
        # torch.distributed.checkpoint shards DTensors alone, and their mesh has to be of the host, as the copy is.
        return DTensor.from_local(
            copy(tensor.to_local()),
            self._host_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )

    def _require_same(self, saved: Mapping[str, Any], folder: Path) -> None:
        """Raise `CheckpointError` unless the checkpoint is of this model and this kind of optimizer."""
        ours = {MODEL + name: tuple(parameter.shape) for name, parameter in self._parameters().items()}
        theirs = {key: tuple(saved[key].size) for key in saved if key.startswith(MODEL)}
        different = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
        if different:
            shapes = ", ".join(
                f"{key.removeprefix(MODEL)} is {theirs.get(key, 'missing')} and not {ours.get(key, 'in this model')}"
                for key in different[:MAX_NAMES]
            )
            raise CheckpointError(f"checkpoint {folder} is of another model: {shapes}")

        if self._schedule_key not in saved:
            name = self.optimizer.config.optimizer.name
            raise CheckpointError(f"checkpoint {folder} was made with another optimizer than trainer.optimizer={name}")


class ChecksummedFiles(FileSystem):
    """The files that a `FileSystemWriter` writes, with the CRC-32 of each."""

    def __init__(self) -> None:
        self.checksums: dict[str, int] = {}  # by name

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[ChecksumWriter]:
        assert mode == "wb", mode
        with ChecksumWriter(Path(path)) as stream:
            yield stream
        self.checksums[Path(path).name] = stream.crc32

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.checksums[Path(new_path).name] = self.checksums.pop(Path(path).name)


def read_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, host tensor) of a checkpoint's parameters, in batches, in a single process.

    Names are those of the source checkpoint, of adapters those of PEFT.
    """
    batch: dict[str, Tensor] = {}
    for key, stored in _read_metadata(folder).items():
        if key.startswith(MODEL):
            batch[key] = torch.empty(stored.size, dtype=stored.properties.dtype)
            if sum(tensor.nbytes for tensor in batch.values()) >= READ_BYTES:
                yield from _read(folder, batch)
                batch = {}
    yield from _read(folder, batch)


def _read(folder: Path, batch: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    # A single process reads on purpose.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    with _wrap_errors(folder, "read"):
        dcp.load(batch, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    yield from ((key.removeprefix(MODEL), tensor) for key, tensor in batch.items())


def _read_metadata(folder: Path) -> dict[str, Any]:
    """Return torch.distributed.checkpoint's metadata of every tensor, by key."""
    try:
        return dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    except UNREADABLE as error:
        raise CheckpointError(f"checkpoint {folder} cannot be read: {_describe(error)}") from error


def _empty_slot(saved: Any, parameter: Tensor) -> Tensor:
    """Return a buffer to read an optimizer tensor into: sharded like its parameter, or a scalar."""
    if saved.size == parameter.shape:
        return torch.zeros_like(parameter.detach())
    return torch.zeros(saved.size, dtype=saved.properties.dtype)


@contextlib.contextmanager
def _wrap_errors(folder: Path, action: str) -> Iterator[None]:
    """Raise the first rank's failure in one line. The stacks of all ranks go to this rank's log."""
    try:
        yield
    # Not an `Exception`: unless it is caught, it ends the actor.
    except CheckpointException as failure:
        log.error("%s", failure)
        rank, (error, _) = min(failure.failures.items())
        raise CheckpointError(
            f"checkpoint {folder} could not be {action} by trainer rank {rank}: {_describe(error)}"
        ) from None


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {one_line(error)}"
