"""NVIDIA GPUs."""

from app.config.device import DeviceKind
from app.device.base import Device
from app.device.cuda_attention import activate_flash_attention
from app.device.cuda_linear_attention import KERNELS

DEVICE = Device(
    kind=DeviceKind.cuda,
    torch_type="cuda",
    collective="nccl",
    resource="GPU",
    visibility="CUDA_VISIBLE_DEVICES",
    engine_flags={"device": "cuda"},
    # Both sides of a process group must agree on cuMem. Graphs stay out of the memory saver's pool
    # (SGLANG_MEMORY_SAVER_CUDA_GRAPH is not set): with NCCL's registered buffers they hang there.
    engine_env={"POSTTRAIN_ENGINE_DEVICE": "cuda", "NCCL_CUMEM_ENABLE": "0", "NCCL_GRAPH_REGISTER": "0"},
    trainer_env={"NCCL_CUMEM_ENABLE": "0", "NCCL_GRAPH_REGISTER": "0"},
    fused_optimizer=True,
    compiles=True,
    head_chunk=2**27,
    activate_attention=activate_flash_attention,
    linear_attention="flash-linear-attention",
    linear_kernels=KERNELS,
    toolkit=("nvidia-smi",),
    allocator_variables=("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
    memory_query=("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"),
    # NVIDIA's datasheets, without sparsity.
    peaks={
        r"\b(H100|H800) PCIe\b": 756.0,
        r"\bH(100|200) NVL\b": 835.0,
        r"\b(H100|H200|H800|GH200)\b": 989.0,
        r"\bH20\b": 148.0,
        r"\b(A100|A800)\b": 312.0,
        r"\bB200\b": 2250.0,
        r"\bL40S\b": 362.0,
    },
    card="an 80 GB H100",
    card_memory_gib=80.0,
    peak_tflops=989.0,
    memory_gb_per_s=3350.0,
    trainer_runtime_gib=1.5,
    engine_runtime_gib=4.0,  # with the decode graphs, which no release frees
    push_seconds_per_gb=0.12,
    steps_in_place=True,
)
