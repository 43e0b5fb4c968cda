"""Reward worker processes: custom rewards, and those that could hang, run where they can be killed."""
