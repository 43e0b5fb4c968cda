"""The FSDP2 trainer: ranks, packing, the split step."""
