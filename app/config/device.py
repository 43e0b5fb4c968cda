"""Settings of `device=`."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from app.config.setting import setting


class DeviceKind(Enum):
    """Hardware that trainer and engines run on."""

    cpu = "cpu"
    cuda = "cuda"
    npu = "npu"


class Dtype(Enum):
    """Compute precision."""

    float32 = "float32"
    bfloat16 = "bfloat16"

    @property
    def bytes(self) -> int:
        return 4 if self is Dtype.float32 else 2


@dataclass
class DeviceConfig:
    """Hardware and precision."""

    kind: DeviceKind = setting(DeviceKind.cpu, "Hardware of trainer and engines.")
    dtype: Dtype = setting(Dtype.float32, "Compute precision of trainer and engines; master weights are float32.")
    memory_gib: float | None = setting(
        None,
        "Memory of one device, for the plan; null reads it from the device or assumes the usual card.",
        above=0,
        noun="a number of GiB",
    )
    engine_args: dict[str, Any] = setting({}, "SGLang server flags for this device, without the dashes.")
