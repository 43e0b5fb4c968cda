"""Runs inside SGLang's processes on a CPU only: attention, operators and buffers in place of SGLang's.

`batched_attention`   one attention call for all requests of a decode step; `kv_cache` has its rows
`operators`           norms, rotary embedding and SiLU with fewer torch operators, of every model
`qwen3_model`         a decode step of Qwen3 without SGLang's modules, where nothing needs them
`gated_delta`         Qwen3.5's linear attention
`weight_buffers`      memory that weight syncs go through
"""
