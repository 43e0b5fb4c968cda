"""Runs inside SGLang's processes: our SGLang plugin. Importing this package imports nothing else.

SGLang finds it through two entry points (pyproject.toml), both in `entry_points`:

    sglang.srt.platforms → `platform`   on CPU: names `platform.TorchCpuPlatform`
    sglang.srt.plugins   → `load`       all devices: `delta_loader` (with `sparse_tensor`), `lora_layers`,
                                        `request_report`
                                        on CPU also: `cpu_attention` (with `cpu_kv_cache`), `cpu_gated_delta`,
                                        `cpu_weight_buffers`, `lora_layers` again
"""
