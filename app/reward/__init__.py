"""Rewards, scored in killable worker processes."""
