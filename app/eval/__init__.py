"""Evaluation on held-out prompts."""
