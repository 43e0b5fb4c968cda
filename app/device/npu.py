"""Ascend NPUs. Not yet run on hardware: taken from the documentation of torch_npu, SGLang and CANN."""

from app.config.device import DeviceKind
from app.device.base import Device

HCCL = {
    "HCCL_CONNECT_TIMEOUT": "1500",
    # Otherwise several processes on one device would clash on HCCL's fixed port.
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
    engine_flags={"device": "npu"},
    engine_env={
        "POSTTRAIN_ENGINE_DEVICE": "npu",
        **HCCL,
        "SGLANG_SET_CPU_AFFINITY": "1",
        "ASCEND_COREDUMP_SIGNAL": "none",
    },
    trainer_env={**HCCL, "ASCEND_COREDUMP_SIGNAL": "none"},
    plugin="torch_npu",
    packages={
        "torch_npu": "the device backend of torch; its version starts with torch's version",
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
