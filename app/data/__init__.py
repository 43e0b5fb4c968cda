"""Prompts: where they come from, in which order, and where we stand."""
