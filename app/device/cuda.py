"""NVIDIA GPUs."""

from app.device.base import Device
from app.device.schema import DeviceKind

DEVICE = Device(
    kind=DeviceKind.cuda,
    torch_type="cuda",
    collective="nccl",
    resource="GPU",
    visibility="CUDA_VISIBLE_DEVICES",
    attention="flash_attention_2",
    engine_args={"device": "cuda"},
    # cuMem must agree on both sides of a group; graphs on memory-saver memory hang
    engine_env={"NCCL_CUMEM_ENABLE": "0", "NCCL_GRAPH_REGISTER": "0"},
    trainer_env={"NCCL_CUMEM_ENABLE": "0", "NCCL_GRAPH_REGISTER": "0"},
)
