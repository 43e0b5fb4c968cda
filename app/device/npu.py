"""Ascend NPUs. Nothing here was run on hardware yet: read from torch_npu's, SGLang's and CANN's documentation."""

from app.config.device import DeviceKind
from app.device.base import Device

HCCL = {
    "HCCL_CONNECT_TIMEOUT": "1500",
    # several processes on a device clash on HCCL's fixed port otherwise
    "HCCL_HOST_SOCKET_PORT_RANGE": "auto",
    "HCCL_NPU_SOCKET_PORT_RANGE": "auto",
    "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES": "1",
}

DEVICE = Device(
    kind=DeviceKind.npu,
    torch_type="npu",
    collective="hccl",
    resource="NPU",
    visibility="ASCEND_RT_VISIBLE_DEVICES",
    attention="flash_attention_2",  # transformers routes it to the fused NPU kernel
    engine_args={"device": "npu"},
    engine_env={
        "POSTTRAIN_ENGINE_DEVICE": "npu",
        **HCCL,
        "SGLANG_SET_CPU_AFFINITY": "1",
        "ASCEND_COREDUMP_SIGNAL": "none",
    },
    trainer_env={**HCCL, "ASCEND_COREDUMP_SIGNAL": "none"},
    plugin="torch_npu",
    packages={
        "torch_npu": "the device itself; its version begins with torch's",
        "sgl_kernel_npu": "SGLang's kernels, from a release of sgl-kernel-npu",
        "triton_ascend": "kernels of linear attention",
    },
    toolkit=("npu-smi", "info"),
    toolkit_variable="ASCEND_HOME_PATH",
    allocator_variables=("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
    machine_env={"RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES": "1"},
    driver_paths=("/usr/local/Ascend/driver", "/etc/ascend_install.info"),
    card="a 64 GB Atlas A2 card or A3 die",
    card_memory_gib=64.0,
    peak_tflops=376.0,
    trainer_runtime_gib=2.0,
    engine_runtime_gib=2.0,
    push_seconds_per_gb=0.19,
)
