"""The FSDP2 trainer: ranks, microbatches and the split train step."""
