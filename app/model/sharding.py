"""A parameter that FSDP2 may have sharded: the whole tensor, or this rank's rows."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def full_tensor(parameter: Tensor) -> Tensor:
    """Return the full tensor on every rank. A collective for a `DTensor`."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def local_shard(parameter: Tensor) -> Tensor:
    """Return this rank's rows of a sharded parameter, or a plain one as it is."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
