"""Rewards: score completions. `component.py` has the signatures of custom ones, docs/extending.md what they see."""
