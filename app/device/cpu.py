"""CPU: the real SGLang and the real FSDP2, over Gloo, in float32."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from app.config.device import DeviceKind
from app.device.base import Device, Fork

# Whether the optional package app/cpu_engine/ is installed: whether SGLang finds its entry point.
try:
    CPU_ENGINE = bool(distribution("hydra-posttrain").entry_points.select(name="cpu_engine"))
except PackageNotFoundError:
    CPU_ENGINE = False

# How often a thread polls before it sleeps while it waits for the other threads of an operator: for about 10 µs. A
# random Qwen3 of 6 layers, 256 wide, had 1.2 times the tokens/s in colocate of threads that sleep at once. Ten times as
# many polls gained no more there, and beside another busy process a trainer then took 1.5 times as long. With libgomp's
# default, far more, a layer took four to ten times as long: the spinning thread occupies the core that the awaited
# thread needs.
BRIEF_SPIN = {"GOMP_SPINCOUNT": "1000"}


def fork_server(environment: Mapping[str, str], log: Path) -> AbstractContextManager[Fork]:
    """See `Device.fork_server`."""
    from app.cpu_engine import forked_server

    return forked_server.fork_server(environment, log)


def use_matmul_of_engines() -> None:
    """Compute a trainer rank's matrix products as the engines do, so that log-probabilities agree."""
    from app.cpu_engine.matmul import use_onednn_matmul

    use_onednn_matmul()


DEVICE = Device(
    kind=DeviceKind.cpu,
    torch_type="cpu",
    collective="gloo",
    resource="CPU",
    visibility=None,
    engine_flags={
        "device": "cpu",
        "attention-backend": "torch_batched" if CPU_ENGINE else "torch_native",
        "sampling-backend": "pytorch",
        "disable-cuda-graph": True,
        "cuda-graph-max-bs-decode": None,
        # A busy-polling scheduler would take a core from the trainer.
        "sleep-on-idle": True,
        # Nothing overlaps on a CPU, and a prompt would reach the prefix cache a batch late.
        "disable-overlap-schedule": True,
    },
    engine_env={
        "SGLANG_PLATFORM": "torch_cpu",
        "POSTTRAIN_ENGINE_DEVICE": "cpu",
        # Convolution state of linear attention; bfloat16 by default.
        "SGLANG_MAMBA_CONV_DTYPE": "float32",
        **BRIEF_SPIN,
    },
    trainer_env=BRIEF_SPIN,
    lora_backend="torch_native",  # app/rollout/engine/sglang_plugin/lora_layers.py
    fork_server=fork_server if CPU_ENGINE else None,
    prepare_rank=use_matmul_of_engines if CPU_ENGINE else None,
    engine_fraction=0.3,
    bucket_mib=64.0,  # its buffers stay, in shared memory with `ipc`
    max_kv_tokens=65536,
    request_bounds=(64, 256),
    shares_memory=False,
    fused_optimizer=True,
    head_chunk=2**21,  # these two keep a chunk in its caches
    head_vocabulary=2**10,
    card="this machine's memory",
    trainer_runtime_gib=0.7,
    engine_runtime_gib=1.8,  # three processes
    push_seconds_per_gb=2.0,
)
