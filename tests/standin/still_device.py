"""A device module for fake tensors: streams and events of a device that does everything at once, and no kernels."""

import contextlib
import time
from typing import Any

import torch


class Event:
    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.at = 0.0

    def record(self, stream: Any = None) -> None:
        self.at = time.perf_counter()

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: "Event") -> float:
        return (end.at - self.at) * 1000


class Stream:
    event_type = Event

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = device

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        event = event or self.event_type()
        event.record(self)
        return event

    def synchronize(self) -> None: ...


class StillDevice:
    """The part of `torch.<device>` that torch, FSDP2 and the trainer call."""

    Event, Stream = Event, Stream

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None: ...

    def manual_seed_all(self, seed: int) -> None: ...

    def manual_seed(self, seed: int) -> None: ...

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, state: Any, device: Any = None) -> None: ...

    def current_stream(self, device: Any = None) -> Any:
        return self.Stream(device)

    def default_stream(self, device: Any = None) -> Any:
        return self.Stream(device)

    def stream(self, stream: Any) -> Any:
        return contextlib.nullcontext()

    def synchronize(self, device: Any = None) -> None: ...

    def empty_cache(self) -> None: ...

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]
