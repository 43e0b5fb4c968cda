"""The CPU as a device: real SGLang and real FSDP2, over gloo, in float32."""

from app.device.base import Device
from app.device.schema import DeviceKind

DEVICE = Device(
    kind=DeviceKind.cpu,
    torch_type="cpu",
    collective="gloo",
    resource="CPU",
    visibility=None,
    attention="packed_sdpa",
    engine_args={
        "device": "cpu",
        "attention-backend": "torch_native",
        "sampling-backend": "pytorch",
        "disable-cuda-graph": True,
        "max-total-tokens": 65536,
        "max-running-requests": 256,
        "mem-fraction-static": 0.3,
    },
    engine_env={"SGLANG_PLATFORM": "torch_cpu", "POSTTRAIN_ENGINE_DEVICE": "cpu"},
    shares_memory=False,
)
