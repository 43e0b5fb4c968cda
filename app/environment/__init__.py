"""Environments: episodes of several turns, run in worker processes beside the driver."""
