"""Gathers FSDP2 shards into full tensors, directly into the buffer that they are sent from.

Invariants:
    - A shard is cast to the engine's dtype before it is gathered (half the bytes for bf16).
    - Rows that divide evenly need no staging buffer. A single rank needs no collective.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


@torch.no_grad()
def gather_full(tensor: Tensor, dtype: torch.dtype, *, out: Tensor | None, on_all_ranks: bool) -> None:
    """Write the full tensor into `out`. A collective over the tensor's mesh.

    Args:
        tensor: A plain tensor, or a `DTensor` on a 1-D mesh.
        dtype: The dtype to send.
        out: 1-D, of `dtype`, with as many elements as the full tensor. None on ranks that receive nothing.
        on_all_ranks: Whether every rank receives the full tensor, or rank 0 of the mesh alone.
    """
    if not isinstance(tensor, DTensor):
        _copy(tensor, out)
        return

    mesh = tensor.device_mesh
    if mesh.size() == 1:
        _copy(tensor.to_local(), out)
    elif mesh.ndim == 1 and tensor.placements == (Shard(0),) and tensor.shape[0] % mesh.size() == 0:
        rows = tensor.to_local().to(dtype).reshape(-1)
        _gather_rows(rows, mesh.get_group(), out, on_all_ranks)
    else:
        _copy(full_tensor(tensor.to(dtype)), out)


def gather_by_rank(local: Tensor, process_group: dist.ProcessGroup, *, on_all_ranks: bool) -> tuple[Tensor, ...] | None:
    """Gather tensors of equal size and dtype in rank order; None on ranks that receive nothing."""
    size = dist.get_world_size(process_group)
    receives = on_all_ranks or dist.get_rank(process_group) == 0
    out = local.new_empty(size * local.numel()) if receives else None
    _gather_rows(local, process_group, out, on_all_ranks)
    return None if out is None else out.chunk(size)


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor on every rank. A collective for a `DTensor`."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _copy(full: Tensor, out: Tensor | None) -> None:
    if out is not None:
        out.view(full.shape).copy_(full)


def _gather_rows(rows: Tensor, process_group: dist.ProcessGroup, out: Tensor | None, on_all_ranks: bool) -> None:
    """Gather shards of equal row counts: each rank's rows are one contiguous slice of `out`."""
    if on_all_ranks:
        assert out is not None
        dist.all_gather_into_tensor(out, rows.contiguous(), group=process_group)
    else:
        slices = None if out is None else list(out.chunk(dist.get_world_size(process_group)))
        dist.gather(rows.contiguous(), slices, group_dst=0, group=process_group)
