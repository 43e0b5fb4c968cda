"""One value per kind of device: everything that shared code must know about it, and nothing else does."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from app.device.schema import DeviceKind
from app.errors import ConfigError

if TYPE_CHECKING:
    import torch


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

    def torch_device(self, index: int = 0) -> "torch.device":
        import torch

        return torch.device(self.torch_type if self.kind is DeviceKind.cpu else f"{self.torch_type}:{index}")

    def count(self) -> int:
        """Devices of this kind on this machine; cores where the device is the CPU."""
        import torch

        if self.kind is DeviceKind.cpu:
            return torch.get_num_threads()
        module = getattr(torch, self.torch_type, None)
        return module.device_count() if module is not None and module.is_available() else 0

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
