"""One value per kind of device: everything that shared code must know about it, and nothing else does."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from app.config.device import DeviceKind
from app.errors import ConfigError

if TYPE_CHECKING:
    import torch

QUERY_SECONDS = 10


@dataclass(frozen=True, slots=True)
class Device:
    """What differs between CPU, CUDA and NPU."""

    kind: DeviceKind
    torch_type: str  # torch.device type
    collective: str  # torch.distributed backend
    resource: str  # Ray's name of it
    visibility: str | None  # environment variable that selects devices
    attention: str  # the trainer's attention implementation, see app/model
    engine_args: Mapping[str, object] = field(default_factory=dict)  # SGLang server flags it always needs
    engine_env: Mapping[str, str] = field(default_factory=dict)
    trainer_env: Mapping[str, str] = field(default_factory=dict)
    shares_memory: bool = True  # trainer and engine fill the same memory, so that offloading frees some
    plugin: str | None = None  # module that registers the device type with torch
    packages: Mapping[str, str] = field(default_factory=dict)  # further ones it needs → what for
    toolkit: tuple[str, ...] | None = None  # command that shows driver and devices
    toolkit_variable: str | None = None  # names the toolkit's folder once its environment is sourced
    driver_paths: tuple[str, ...] = ()  # files of the driver that a container must be given
    allocator_variables: tuple[str, ...] = ()  # where expandable segments could be asked for
    machine_env: Mapping[str, str] = field(default_factory=dict)  # what nodes of a cluster are started with
    memory_query: tuple[str, ...] | None = None  # command whose first line is the memory of a device in MiB
    card: str = ""  # what the numbers below stand for, where the machine cannot be asked
    card_memory_gib: float | None = None  # None: a share of this machine's memory
    peak_tflops: float | None = None  # of the card, dense bfloat16; None: not worth an estimate
    trainer_runtime_gib: float = 0.0  # a rank's own: context, kernels, collective buffers; stays when offloaded
    engine_runtime_gib: float = 0.0  # an engine rank's own
    push_seconds_per_gb: float = 0.0  # of a weight sync over `collective`
    steps_in_place: bool = False  # the optimizer updates tensor by tensor, without temporaries of all of them

    def torch_device(self, index: int = 0) -> "torch.device":
        import torch

        return torch.device(self.torch_type if self.kind is DeviceKind.cpu else f"{self.torch_type}:{index}")

    def count(self) -> int:
        """Devices of this kind on this machine; cores where the device is the CPU."""
        if self.kind is DeviceKind.cpu:
            return os.cpu_count() or 1
        import torch

        module = getattr(torch, self.torch_type, None)
        return module.device_count() if module is not None and module.is_available() else 0

    def memory_gib(self) -> float | None:
        """Memory of one device (of this machine, where the device is the CPU), without torch; None: cannot be asked."""
        if self.kind is DeviceKind.cpu:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        if self.memory_query is None or shutil.which(self.memory_query[0]) is None:
            return None
        asked = subprocess.run(self.memory_query, capture_output=True, text=True, timeout=QUERY_SECONDS)
        lines = asked.stdout.split()
        return float(lines[0]) / 1024 if asked.returncode == 0 and lines else None

    def require(self) -> None:
        """Raise `ConfigError` where this machine has no such device."""
        if self.plugin is not None:
            try:
                __import__(self.plugin)
            except (ImportError, OSError) as error:
                raise ConfigError(
                    f"device={self.kind.name} cannot be used here: {self.plugin} does not import ({error}); "
                    "use device=cpu or a machine that has it."
                ) from None
        if self.count() == 0:
            raise ConfigError(
                f"device={self.kind.name} is not accepted: this machine shows no such device to torch; "
                "use device=cpu, or run where one is visible."
            )
