"""The FSDP2 trainer: ranks, microbatches and the split train step.

What a backward pass recomputes and the mesh of `trainer.replicas` (HSDP) are in `app/model/parallelize.py`; what is
`auto` is decided by `app/mode/plan/memory.py`, and `optimizer.py` averages gradients over replicas.
"""
