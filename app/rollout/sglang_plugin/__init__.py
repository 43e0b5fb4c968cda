"""Runs inside SGLang's processes: our SGLang plugin. Importing this package imports nothing else.

SGLang finds it through two entry points (pyproject.toml), both in `entry_points`:

    sglang.srt.platforms → `platform`   on CPU: names `platform.TorchCpuPlatform`
    sglang.srt.plugins   → `load`       all devices: `delta_loader` (with `sparse_tensor`), `lora_layers`,
                                        `request_report`, `entry_points.name_shared_memory`; on CPU `lora_layers`
                                        again, `sampling`, `shared_prompts`

On a CPU the optional package app/cpu_engine/ adds an entry point of its own.
"""
