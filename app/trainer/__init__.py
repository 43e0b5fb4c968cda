"""The FSDP2 trainer: ranks, microbatches and the split train step.

The model, its sharding and what its backward pass recomputes are `app/model/`. `app/mode/plan/memory.py` decides what
is `auto`. The mesh of `trainer.replicas` (HSDP) is made by `app/model/sharding.py`; `optimizer.py` averages gradients.
"""
