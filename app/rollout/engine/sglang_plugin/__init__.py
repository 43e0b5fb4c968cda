"""Runs inside SGLang's processes: our SGLang plugin. Importing this package imports nothing else.

SGLang finds it through two entry points (pyproject.toml), both in `entry_points`:

    sglang.srt.platforms → `platform`   on CPU: names `platform.TorchCpuPlatform`
    sglang.srt.plugins   → `load`       all devices: `delta_loader` (with `sparse_tensor`), `derived_weights`,
                                        `lora_layers`, `request_report`, `entry_points.name_shared_memory`; on CPU
                                        `lora_layers` again, `sampling`, `shared_prompts`

A server whose hooks are not all installed does not start (`entry_points.require_hooks`).

On a CPU the optional package app/cpu_engine/ adds an entry point of its own.
"""
