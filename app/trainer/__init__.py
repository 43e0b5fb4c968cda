"""The FSDP2 trainer: ranks, microbatches and the split train step.

The model, its sharding and what its backward pass recomputes are `app/model/`. What is `auto` of that is decided by
`app/mode/plan/memory.py`. Replicas (HSDP) are a mesh of `app/model/sharding.py`, averaged in `optimizer.py`.
"""
