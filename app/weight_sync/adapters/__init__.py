"""Weight syncs of low-rank adapters (`model.lora`): every policy version is a new adapter of the engines."""
