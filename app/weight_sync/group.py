"""The process group of a push, outside of torch's WORLD.

Built exactly as SGLang builds its side (`sglang.srt.utils.init_custom_process_group`): torch's public constructor would
never meet it, since that one prefixes its store differently.
"""

from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    Backend,
    GroupName,
    PrefixStore,
    _new_process_group_helper,
    _world,
    rendezvous,
)


def join(*, backend: str, url: str, world_size: int, rank: int, name: str, timeout_s: float) -> dist.ProcessGroup:
    """Join the group at `url` (`tcp://host:port`); blocks until all members are there, or raises after `timeout_s`."""
    timeout = timedelta(seconds=timeout_s)
    store, rank, world_size = next(rendezvous(url, rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    group, _ = _new_process_group_helper(
        world_size,
        rank,
        [],
        Backend(backend),
        PrefixStore(name, store),
        group_name=GroupName(name),
        backend_options=None,
        timeout=timeout,
    )
    _world.pg_group_ranks[group] = {member: member for member in range(world_size)}
    return group
