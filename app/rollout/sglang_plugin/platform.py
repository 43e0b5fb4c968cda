"""Runs inside SGLang's processes: a CPU platform with SGLang's native torch code, without its CPU kernels."""

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from app.rollout.sglang_plugin.cpu.operators import NATIVE


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """A CPU whose operators are plain torch and whose attention is `batched_attention`."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        """Return the name that `batched_attention` registers."""
        return "torch_batched"

    def get_dispatch_key_name(self) -> str:
        """Return the name of SGLang's plain-torch operators."""
        return NATIVE
