"""The tiny model: created from a seed on first use, for `model=tiny` and `model=tiny_qwen35`."""
