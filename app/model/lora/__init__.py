"""Low-rank adapters (LoRA) of a policy."""
