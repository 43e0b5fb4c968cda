"""Checkpoint-engine weight sync: copies the trainer's parameters into every rollout engine."""
