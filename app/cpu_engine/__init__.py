"""Optional package: makes SGLang's engines, and their start, fast on a CPU. Deletable with its line in pyproject.toml.

Inside SGLang's processes, by SGLang's entry point `sglang.srt.plugins` (`plugin`):

    `batched_attention`   one attention call for all requests of a step; `kv_cache` has the rows of a decode step
    `operators`           norms, rotary embedding and SiLU with fewer torch operators, of every model
    `dense_model`         a decode step of Llama, Qwen2 and Qwen3 without SGLang's modules, where nothing needs them
    `gated_delta`         Qwen3.5's linear attention, which SGLang has for accelerators only
    `matmul`              matrix products by oneDNN; the trainer uses them too

Outside of them, by app/device/cpu.py:

    `fork_server`         the process that imports SGLang once and forks servers; `forked_server` is its client

Without this package every server imports SGLang, and computes with SGLang's own torch operators. Qwen3.5 does not run.
"""
