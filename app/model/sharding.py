"""A parameter that FSDP2 may have sharded: the whole tensor, or this rank's rows."""

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


def full_tensor(parameter: Tensor) -> Tensor:
    """Return the full tensor on every rank. A collective for a `DTensor`."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def local_shard(parameter: Tensor) -> Tensor:
    """Return this rank's rows of a sharded parameter, or a plain one as it is."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def replicas(parameter: Tensor) -> int:
    """Return how many ranks hold what this rank holds of a parameter: 1 unless the trainer has replicas."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return ranks // (parameter.device_mesh.size() if isinstance(parameter, DTensor) else 1)


def own_rows(parameter: DTensor) -> slice:
    """Rows of this rank. FSDP2 splits dimension 0 into chunks of equal size; the last ones are shorter or empty."""
    rows = parameter.shape[0]
    for dimension, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard):
            chunk = -(-rows // parameter.device_mesh.size(dimension))
            start = min(parameter.device_mesh.get_local_rank(dimension) * chunk, rows)
            return slice(start, min(start + chunk, rows))
    return slice(0, rows)
