"""Runs inside SGLang's processes: our SGLang plugin. Importing this package imports nothing else.

SGLang finds it through two entry points (pyproject.toml), both in `entry_points`:

    sglang.srt.platforms → `platform`   on CPU: names `platform.TorchCpuPlatform`
    sglang.srt.plugins   → `load`       `delta_loader` (with `sparse_tensor`), `lora_layers`, `patches`, and the hooks
                                        of `entry_points` itself

A server whose hooks are not all installed does not start (`entry_points.require_hooks`).

On a CPU the optional package app/cpu_engine/ adds an entry point of its own.
"""
