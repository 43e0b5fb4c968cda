"""The extension of a trainer rank that hands its adapters to the engines.

A push is small (132 MB for rank 32 of a 4B), so rank 0 gathers all of it at once and needs no buckets. SGLang keeps an
adapter in host memory and may read the memory that it was given for as long as the adapter is loaded: every push has a
buffer of its own, which its last reader frees.
"""

import base64
import io
import pickle
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from app.model.lora.names import served, served_config
from app.model.policy import named_trained_tensors
from app.trainer.rank import TrainerRank
from app.types import TrainerMemory
from app.weight_sync.buckets import Bucket, TensorMeta
from app.weight_sync.gather import Receivers, gather_full
from app.weight_sync.transport.ipc_payload import (
    SHARED_MEMORY,
    allocate_shared,
    flattened,
    serialize_bucket,
    shared_memory_name,
)

ADAPTER_EXTENSION: Final = "adapter_sync"  # the name under which an `AdapterSender` is attached to every trainer rank
HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class AdapterPush:
    """What rank 0 gathered of one policy version."""

    config: dict[str, Any]  # what SGLang needs of PEFT's adapter_config.json
    handles: tuple[str, ...]  # one for each engine rank, in the order of the engines; empty: `inline` is sent
    inline: str | None  # the same for every engine rank
    bytes: int

    def body(self, place: int, tensor_parallel: int) -> dict[str, object]:
        """Return the request for the engine at this place in the order of the engines."""
        ranks = range(place * tensor_parallel, (place + 1) * tensor_parallel)
        payloads = [self.inline if self.inline is not None else self.handles[rank] for rank in ranks]
        return {
            "config_dict": self.config,
            "serialized_named_tensors": payloads,
            "load_format": "flattened_bucket",
        }


class AdapterSender:
    """Gathers the adapters of a trainer rank.

    Lifecycle: `gather` for each sync, `close` once.
    """

    def __init__(self, trainer_rank: TrainerRank):
        self.trainer_rank = trainer_rank
        self.dtype = getattr(torch, trainer_rank.spec.dtype.name)
        self.tensors = dict(named_trained_tensors(trainer_rank.model))
        self.receivers = Receivers.rank_0 if trainer_rank.device.has_gather else Receivers.rank_0_by_all_gather
        self._buffer: Tensor | None = None  # of the last push
        self._names: list[str] = []  # of the shared memory that may still exist

    def gather(self, handles: int) -> AdapterPush | None:
        """Gather the adapters in the engines' dtype. A collective; None on ranks other than 0.

        Args:
            handles: Engine ranks of this machine, which get a handle each. 0: one payload that holds the bytes.
        """
        self.trainer_rank.require_onloaded("weight sync", TrainerMemory.parameters)
        tensors = [pair for name in self.tensors for pair in self._gather(name)]
        if self.trainer_rank.rank != 0:
            return None

        bucket = Bucket(tuple(TensorMeta(name, self._dtype_name, tuple(each.shape)) for name, each in tensors))
        buffer = self._allocate(bucket.bytes, shared=handles > 0)
        for meta, offset, (_, tensor) in zip(bucket.tensors, bucket.offsets, tensors, strict=True):
            buffer[offset : offset + meta.bytes].view(self.dtype).copy_(tensor.reshape(-1))

        return AdapterPush(
            config=served_config(self.trainer_rank.spec.lora),
            handles=tuple(serialize_bucket(buffer, bucket) for _ in range(handles)),
            inline=None if handles else serialize_bytes(buffer, bucket),
            bytes=bucket.bytes,
        )

    def close(self) -> None:
        """Free the last push, and the shared memory of pushes whose engine was killed."""
        self._buffer = None
        for name in self._names:
            (SHARED_MEMORY / name).unlink(missing_ok=True)
        self._names = []

    @property
    def _dtype_name(self) -> str:
        return self.trainer_rank.spec.dtype.name

    def _gather(self, name: str) -> list[tuple[str, Tensor]]:
        """Return the full tensor under the engine's names; nothing on ranks other than 0."""
        tensor = self.tensors[name].detach()
        out = None
        if self.trainer_rank.rank == 0:
            out = torch.empty(tensor.numel(), dtype=self.dtype, device=tensor.device)
        gather_full(tensor, self.dtype, out=out, receivers=self.receivers)
        if out is None:
            return []
        return served(name, out.view(tensor.shape), self.trainer_rank.model.config)

    def _allocate(self, size: int, *, shared: bool) -> Tensor:
        if not shared:
            return torch.empty(size, dtype=torch.uint8)
        self._buffer = None  # engines that read it keep it
        self._names = [name for name in self._names if (SHARED_MEMORY / name).exists()]
        self._buffer = allocate_shared(size, HOST)
        self._names.append(shared_memory_name(self._buffer))
        return self._buffer


def serialize_bytes(buffer: Tensor, bucket: Bucket) -> str:
    """Return the payload of a bucket with its bytes, for an engine on any machine."""
    pickled = io.BytesIO()
    pickle.dump(flattened(buffer, bucket), pickled, protocol=pickle.HIGHEST_PROTOCOL)
    return base64.b64encode(pickled.getvalue()).decode()
