"""From FSDP2 shards to whole tensors, written where they are sent from.

What always holds: a shard is cast to the engine's dtype before it travels (half the bytes for bf16), and what can be
gathered straight into the bucket is: rows that divide evenly need no staging, a lone rank no collective at all.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


@torch.no_grad()
def gather(tensor: Tensor, dtype: torch.dtype, room: Tensor | None, *, everywhere: bool) -> None:
    """Write the whole of `tensor` as `dtype` into `room` (1-D of `dtype`, its size); a collective over its mesh.

    `everywhere`: every rank has a room; otherwise rank 0 of the mesh has one and the others pass None.
    """
    if not isinstance(tensor, DTensor):
        _fill(room, tensor)
        return
    mesh, shard = tensor.device_mesh, tensor.to_local()
    if mesh.size() == 1:
        _fill(room, shard)
    elif mesh.ndim == 1 and tensor.placements == (Shard(0),) and tensor.shape[0] % mesh.size() == 0:
        _gather_rows(shard.to(dtype).reshape(-1), mesh.get_group(), room, everywhere)
    else:
        cast: Any = tensor.to(dtype)
        _fill(room, cast.full_tensor())


def gather_parts(part: Tensor, group: Any, *, everywhere: bool) -> list[Tensor] | None:
    """The parts of all ranks, of one size and dtype, in rank order; None on the ranks that keep nothing."""
    if not everywhere and dist.get_rank(group) != 0:
        dist.gather(part, None, group_dst=0, group=group)
        return None
    whole = torch.empty(dist.get_world_size(group) * part.numel(), dtype=part.dtype, device=part.device)
    _gather_rows(part, group, whole, everywhere)
    return list(whole.chunk(dist.get_world_size(group)))


def _fill(room: Tensor | None, whole: Tensor) -> None:
    if room is not None:
        room.view(whole.shape).copy_(whole)


def _gather_rows(shard: Tensor, group: Any, room: Tensor | None, everywhere: bool) -> None:
    """Rows of equal count lie one behind the other in the whole tensor, so each rank's land in a slice of the room."""
    if everywhere:
        assert room is not None
        dist.all_gather_into_tensor(room, shard.contiguous(), group=group)
    else:
        slices = list(room.chunk(dist.get_world_size(group))) if room is not None else None
        dist.gather(shard.contiguous(), slices, group_dst=0, group=group)
