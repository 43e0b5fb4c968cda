"""Device abstraction: one `Device` value holds every difference between CPU, CUDA and NPU.

Shared code never branches on the kind of device; it reads the fields of the value.
"""

from app.config.device import DeviceKind
from app.device.base import Device, Fork

__all__ = ["Device", "Fork", "device_of"]


def device_of(kind: DeviceKind) -> Device:
    """Return the `Device` of a kind. Importing it requires no accelerator library."""
    from app.device import cpu, cuda, npu

    return {DeviceKind.cpu: cpu.DEVICE, DeviceKind.cuda: cuda.DEVICE, DeviceKind.npu: npu.DEVICE}[kind]
