"""NVIDIA GPUs."""

from app.config.device import DeviceKind
from app.device.base import Device
from app.device.cuda_attention import activate_flash_attention

DEVICE = Device(
    kind=DeviceKind.cuda,
    torch_type="cuda",
    collective="nccl",
    resource="GPU",
    visibility="CUDA_VISIBLE_DEVICES",
    engine_flags={"device": "cuda"},
    # Both sides of a process group must agree on cuMem. CUDA graphs on memory-saver memory hang.
    engine_env={"POSTTRAIN_ENGINE_DEVICE": "cuda", "NCCL_CUMEM_ENABLE": "0", "NCCL_GRAPH_REGISTER": "0"},
    trainer_env={"NCCL_CUMEM_ENABLE": "0", "NCCL_GRAPH_REGISTER": "0"},
    fused_optimizer=True,
    compiles=True,
    head_chunk=2**27,
    activate_attention=activate_flash_attention,
    linear_attention="flash-linear-attention",
    toolkit=("nvidia-smi",),
    allocator_variables=("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
    memory_query=("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"),
    card="an 80 GB H100",
    card_memory_gib=80.0,
    peak_tflops=989.0,
    trainer_runtime_gib=1.5,
    engine_runtime_gib=1.5,
    push_seconds_per_gb=0.12,
    steps_in_place=True,
)
