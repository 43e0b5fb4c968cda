"""Gathers FSDP2 shards into full tensors, directly into the buffer that they are sent from.

Invariants:
    - A shard is cast to the engine's dtype before it is gathered (half the bytes for bf16).
    - Rows that divide evenly need no staging buffer. A single rank needs no collective.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from app.model.sharding import full_tensor
from app.weight_sync.buckets import Receivers


@torch.no_grad()
def gather_full(tensor: Tensor, dtype: torch.dtype, *, out: Tensor | None, receivers: Receivers) -> None:
    """Write the full tensor into `out`. A collective over the tensor's mesh.

    Args:
        tensor: A plain tensor, or a `DTensor` on a 1-D mesh.
        out: 1-D, of `dtype`, with as many elements as the full tensor. None on ranks that receive nothing.
        receivers: The ranks that receive the full tensor. A replica of the trainer without any gathers nothing.
    """
    if not isinstance(tensor, DTensor):
        _copy(tensor, out)
        return

    mesh = tensor.device_mesh
    if mesh.size() == 1:
        _copy(tensor.to_local(), out)
    elif receivers is not Receivers.every_rank and dist.get_rank() >= mesh.size():  # a later replica
        return
    elif mesh.ndim == 1 and tensor.placements == (Shard(0),) and tensor.shape[0] % mesh.size() == 0:
        rows = tensor.to_local().to(dtype).reshape(-1)
        _gather_rows(rows, mesh.get_group(), out, receivers)
    else:
        _copy(full_tensor(tensor.to(dtype)), out)


def gather_by_rank(
    local: Tensor, process_group: dist.ProcessGroup, *, receivers: Receivers
) -> tuple[Tensor, ...] | None:
    """Gather tensors of equal size and dtype in rank order; None on ranks that receive nothing."""
    size = dist.get_world_size(process_group)
    receives = receivers is Receivers.every_rank or dist.get_rank(process_group) == 0
    out = local.new_empty(size * local.numel()) if receives else None
    _gather_rows(local, process_group, out, receivers)
    return None if out is None else out.chunk(size)


def all_gather(out: Tensor, own: Tensor, process_group: dist.ProcessGroup) -> None:
    """Gather the contiguous tensors of all ranks into `out`, in rank order."""
    if hasattr(dist, "all_gather_single"):  # from torch 2.13 on, where the other name is deprecated
        dist.all_gather_single(out, own, group=process_group)
    else:
        dist.all_gather_into_tensor(out, own, group=process_group)


def _copy(full: Tensor, out: Tensor | None) -> None:
    if out is not None:
        out.view(full.shape).copy_(full)


def _gather_rows(rows: Tensor, process_group: dist.ProcessGroup, out: Tensor | None, receivers: Receivers) -> None:
    """Gather shards of equal row counts: each rank's rows are one contiguous slice of `out`."""
    ranks = dist.get_world_size(process_group)
    if receivers is Receivers.rank_0:
        slices = None if out is None else list(out.chunk(ranks))
        dist.gather(rows.contiguous(), slices, group_dst=0, group=process_group)
    else:
        scratch = rows.new_empty(ranks * rows.numel()) if out is None else out
        all_gather(scratch, rows.contiguous(), process_group)
