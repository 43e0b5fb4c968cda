"""Checkpoints of a run, and their export as Hugging Face directories."""
