"""The device seam: everything that differs between CPU, CUDA and NPU stands in one `Device` value."""

from app.config.device import DeviceKind
from app.device.base import Device

__all__ = ["Device", "device_of"]


def device_of(kind: DeviceKind) -> Device:
    """The value of this kind; importing it needs no accelerator library."""
    from app.device import cpu, cuda, npu

    return {DeviceKind.cpu: cpu.DEVICE, DeviceKind.cuda: cuda.DEVICE, DeviceKind.npu: npu.DEVICE}[kind]
