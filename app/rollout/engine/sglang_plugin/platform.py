"""Runs inside SGLang's processes: a CPU platform with SGLang's native torch code, without its CPU kernels."""

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

NATIVE = "native"  # SGLang's key of plain-torch operators


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """A CPU whose operators are plain torch."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_dispatch_key_name(self) -> str:
        return NATIVE
