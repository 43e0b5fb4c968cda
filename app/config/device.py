"""Settings of `device=`."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from app.errors import expect


class DeviceKind(Enum):
    cpu = "cpu"
    cuda = "cuda"
    npu = "npu"


class Dtype(Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"

    @property
    def bytes(self) -> int:
        return 4 if self is Dtype.float32 else 2


@dataclass
class DeviceConfig:
    kind: DeviceKind = DeviceKind.cpu
    dtype: Dtype = Dtype.float32  # compute in trainer and engine; masters are float32
    memory_gib: float | None = None  # of one device, for the plan; null: asked of the device
    engine_args: dict[str, Any] = field(default_factory=dict)  # SGLang server flags, without the dashes


def validate(config: DeviceConfig) -> None:
    expect(
        config.memory_gib is None or config.memory_gib > 0,
        "device.memory_gib",
        config.memory_gib,
        "null or GiB above 0",
    )
