"""Rewards: score completions. `component.py` has the signatures of custom ones, docs/rewards.md their inputs."""
