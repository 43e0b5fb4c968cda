"""The process group of a weight sync, outside of torch's WORLD.

Built exactly as SGLang builds its side (`sglang.srt.utils.init_custom_process_group`). torch's public constructor
prefixes its store differently and would never connect to it. Joining blocks until every member has joined, so it runs
in a thread and the trainer rank can still reply and abort.
"""

import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world

from app.utils.net import Listener


class SyncProcessGroup:
    """Rank 0 of the process group: the source of all broadcasts, and the host of the store.

    Lifecycle: created and joining in the background; `broadcast` after `joined`; `abort` in any state.
    """

    def __init__(self, *, backend: str, address: str, world_size: int, name: str, timeout_s: float):
        self.backend = backend
        self.world_size = world_size
        self.name = name
        self._timeout = timedelta(seconds=timeout_s)
        listener = Listener(address)  # else the store would listen at all addresses of this machine
        self.port = listener.port
        self._store: dist.Store | None = dist.TCPStore(
            address,
            self.port,
            is_master=True,
            timeout=self._timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self._process_group: dist.ProcessGroup | None = None
        self._failure: Exception | None = None
        self._joining = threading.Thread(target=self._join, name=f"join-{name}", daemon=True)
        self._joining.start()

    def joined(self) -> bool:
        """Return whether all members have joined. Raises the error that joining failed with."""
        if self._joining.is_alive():
            return False
        if self._failure is not None:
            raise self._failure
        return True

    def broadcast(self, buffer: torch.Tensor) -> dist.Work:
        """Start sending `buffer` to all members."""
        assert self._process_group is not None, "joined"
        work = dist.broadcast(buffer, src=0, group=self._process_group, async_op=True)
        assert work is not None
        return work

    def abort(self, device: torch.device) -> None:
        """Leave the process group. A broadcast in flight ends at once, a pending join at its deadline."""
        self._store = None
        if self._process_group is None:
            return
        process_group = self._process_group
        self._process_group = None
        process_group._get_backend(device).abort()
        dist.destroy_process_group(process_group)

    def _join(self) -> None:
        assert self._store is not None
        try:
            process_group, _ = _new_process_group_helper(
                self.world_size,
                0,
                [],
                Backend(self.backend),
                PrefixStore(self.name, self._store),
                group_name=self.name,  # type: ignore[arg-type]
                backend_options=None,
                timeout=self._timeout,
            )
            _world.pg_group_ranks[process_group] = {member: member for member in range(self.world_size)}
            self._process_group = process_group
        except (RuntimeError, ValueError, OSError) as error:
            self._failure = error
