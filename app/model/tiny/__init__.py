"""The tiny model: created from a seed on first use, for `model=tiny`, `tiny_qwen35` and `tiny_tools`."""
