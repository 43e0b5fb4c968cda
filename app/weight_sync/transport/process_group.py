"""The process group of a weight sync, outside of torch's WORLD.

Built exactly as SGLang builds its side (`sglang.srt.utils.init_custom_process_group`). torch's public constructor
prefixes its store differently and would never connect to it.

Invariants:
    - No call blocks beyond its deadline. Joining waits for every member, and the first broadcast may wait for them once
      more: except for Gloo, collective libraries build their communicator in it. Both run in threads of their own.
    - `abort` works in any state and from any thread. It ends a `wait` at once.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world

from app.utils.net import listen

log = logging.getLogger(__name__)
POLL_S = 0.0005  # between two looks at a broadcast in flight
LEAVE_S = 1.0  # for the collective library to abort


@dataclass(eq=False, kw_only=True)
class SyncProcessGroup:
    """Rank 0 of the process group: the source of all broadcasts, and the host of the store.

    Lifecycle: created and joining in the background; after `joined`, `broadcast` and `wait` alternate; `abort` in any
    state, then nothing else.
    """

    backend: str
    device: torch.device  # of the buffers
    address: str
    world_size: int
    name: str
    timeout_s: float  # for joining
    abort_backend: Callable[[Any], None]  # ends everything in flight in a torch backend (`Device.abort_backend`)

    def __post_init__(self) -> None:
        listener = listen(self.address)  # else the store would listen at all addresses of this machine
        self.port: int = listener.getsockname()[1]
        self._store: dist.Store | None = dist.TCPStore(
            self.address,
            self.port,
            is_master=True,
            timeout=timedelta(seconds=self.timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

        self._process_group: dist.ProcessGroup | None = None
        self._failure: Exception | None = None
        self._aborted = threading.Event()
        self._broadcast: Broadcast | None = None  # the last one
        self._joining = threading.Thread(target=self._join, name=f"join-{self.name}", daemon=True)
        self._joining.start()

    def joined(self) -> bool:
        """Return whether all members have joined. Raises the error that joining failed with."""
        if self._joining.is_alive():
            return False
        if self._failure is not None:
            raise self._failure
        return True

    def broadcast(self, buffer: torch.Tensor) -> None:
        """Start sending `buffer` to all members. It must not change before `wait` returns."""
        process_group = self._process_group
        if process_group is None or self._aborted.is_set():
            raise RuntimeError("the process group was aborted")
        self._broadcast = Broadcast(process_group, buffer, self._aborted)

    def wait(self, timeout_s: float) -> None:
        """Wait until the last broadcast is sent. Raises `RuntimeError` if it failed, was aborted or took too long."""
        if self._broadcast is not None:
            self._broadcast.wait(timeout_s)
            self._broadcast = None

    def abort(self) -> None:
        """Leave the process group, within about `LEAVE_S`. A join in progress ends at its own deadline."""
        self._aborted.set()
        self._store = None
        if self._broadcast is not None:
            self._broadcast.ended.set()

        leaving = threading.Thread(target=self._leave, name=f"leave-{self.name}", daemon=True)
        leaving.start()
        leaving.join(LEAVE_S)
        if leaving.is_alive():
            log.warning("process group %s: the collective library did not abort within %g s", self.name, LEAVE_S)

    def _leave(self) -> None:
        process_group, self._process_group = self._process_group, None
        if process_group is None:
            return

        try:
            self.abort_backend(process_group._get_backend(self.device))
            if self._broadcast is None or self._broadcast.thread_ended(LEAVE_S):
                dist.destroy_process_group(process_group)
            else:
                # its thread still uses the process group, inside the library
                log.warning("process group %s: a broadcast does not end, so its memory is not freed", self.name)
        except (RuntimeError, ValueError) as error:
            log.warning("process group %s: it was not left cleanly: %s", self.name, error)

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
                # At this timeout, watchdogs of collective libraries end the whole process. Our own deadline comes first
                # and ends the sync alone.
                timeout=timedelta(seconds=2 * self.timeout_s + 60),
            )
            # `dist.broadcast` looks the source's rank up here; only torch's public constructors register a group.
            _world.pg_group_ranks[process_group] = {member: member for member in range(self.world_size)}
            self._process_group = process_group
            if self._aborted.is_set():
                self._leave()
        except (RuntimeError, ValueError, OSError) as error:
            self._failure = error


class Broadcast:
    """One broadcast from rank 0, in a thread of its own.

    Completion is polled: not every library's `Work.wait` respects a timeout.
    """

    def __init__(self, process_group: dist.ProcessGroup, buffer: torch.Tensor, aborted: threading.Event):
        self.ended = threading.Event()  # sent, failed or aborted
        self._aborted = aborted
        self._failure: RuntimeError | None = None
        self._thread = threading.Thread(target=self._send, args=(process_group, buffer), name="broadcast", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> None:
        """Wait until it is sent. Raises `RuntimeError` if it failed, was aborted or took too long."""
        if not self.ended.wait(timeout_s):
            raise RuntimeError(f"it did not finish within weight_sync.timeout_s={timeout_s:g} s")
        if self._failure is not None:
            raise self._failure
        if self._aborted.is_set():
            raise RuntimeError("the process group was aborted")

    def thread_ended(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _send(self, process_group: dist.ProcessGroup, buffer: torch.Tensor) -> None:
        try:
            if buffer.device.type != "cpu":
                torch.get_device_module(buffer.device).set_device(buffer.device)  # of this thread
            work = dist.broadcast(buffer, src=0, group=process_group, async_op=True)
            assert work is not None

            while not work.is_completed():
                if self._aborted.wait(POLL_S):
                    return

            work.wait()
            if buffer.device.type != "cpu":
                torch.get_device_module(buffer.device).current_stream().synchronize()
        except RuntimeError as error:
            self._failure = error
        finally:
            self.ended.set()
