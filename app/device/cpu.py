"""CPU: the real SGLang and the real FSDP2, over Gloo, in float32."""

from app.config.device import DeviceKind
from app.device.base import Device

DEVICE = Device(
    kind=DeviceKind.cpu,
    torch_type="cpu",
    collective="gloo",
    resource="CPU",
    visibility=None,
    engine_flags={
        "device": "cpu",
        "attention-backend": "torch_batched",  # app/rollout/sglang_plugin/cpu/batched_attention.py
        "sampling-backend": "pytorch",
        "disable-cuda-graph": True,
        "cuda-graph-max-bs-decode": None,
        "max-total-tokens": 65536,
        "max-running-requests": 256,
        "mem-fraction-static": 0.3,
        # A busy-polling scheduler would take a core from the trainer.
        "sleep-on-idle": True,
    },
    engine_env={
        "SGLANG_PLATFORM": "torch_cpu",
        "POSTTRAIN_ENGINE_DEVICE": "cpu",
        # Convolution state of linear attention; bfloat16 by default.
        "SGLANG_MAMBA_CONV_DTYPE": "float32",
    },
    lora_backend="torch_native",  # app/rollout/sglang_plugin/lora_layers.py
    forks_engines=True,  # as SGLang's own children: app/rollout/sglang_plugin/entry_points.py
    shares_memory=False,
    fused_optimizer=True,
    head_chunk=2**21,  # these two keep a chunk in its caches
    head_vocabulary=2**10,
    card="this machine's memory",
    trainer_runtime_gib=0.7,
    engine_runtime_gib=1.8,  # three processes
    push_seconds_per_gb=2.0,
    steps_in_place=True,
)
