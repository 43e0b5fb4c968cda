"""Low-rank adapters (`model.lora`)."""
