"""The process group of a push, outside of torch's WORLD.

Built exactly as SGLang builds its side (`sglang.srt.utils.init_custom_process_group`): torch's public constructor would
never meet it, since that one prefixes its store differently. Joining blocks until every member is there, so it happens
in a thread, and whoever asked for it stays able to answer and to give up.
"""

import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world


class Group:
    """The source's membership: rank 0, whose store the others meet at."""

    def __init__(self, *, backend: str, address: str, world_size: int, name: str, timeout_s: float):
        self.backend, self.world_size, self.name = backend, world_size, name
        self._timeout = timedelta(seconds=timeout_s)
        self._store: dist.Store | None = dist.TCPStore(
            address, 0, None, is_master=True, timeout=self._timeout, wait_for_workers=False
        )
        self.port: int = self._store.port
        self._group: dist.ProcessGroup | None = None
        self._failure: Exception | None = None
        self._joining = threading.Thread(target=self._join, name=f"join-{name}", daemon=True)
        self._joining.start()

    def joined(self) -> bool:
        """Whether all members are there; raises what kept them apart."""
        if self._joining.is_alive():
            return False
        if self._failure is not None:
            raise self._failure
        return True

    def broadcast(self, buffer: torch.Tensor) -> dist.Work:
        """Start sending `buffer` to all members."""
        assert self._group is not None, "joined"
        work = dist.broadcast(buffer, src=0, group=self._group, async_op=True)
        assert work is not None
        return work

    def leave(self, device: torch.device) -> None:
        """Leave; a broadcast that nobody will receive ends at once, a pending join when its deadline passes."""
        self._store = None
        if self._group is None:
            return
        group, self._group = self._group, None
        group._get_backend(device).abort()
        dist.destroy_process_group(group)

    def _join(self) -> None:
        assert self._store is not None
        try:
            group, _ = _new_process_group_helper(
                self.world_size,
                0,
                [],
                Backend(self.backend),
                PrefixStore(self.name, self._store),
                group_name=self.name,  # type: ignore[arg-type]
                backend_options=None,
                timeout=self._timeout,
            )
            _world.pg_group_ranks[group] = {member: member for member in range(self.world_size)}
            self._group = group
        except (RuntimeError, ValueError, OSError) as error:
            self._failure = error
