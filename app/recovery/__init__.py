"""Failure recovery: engine restarts, weight sync retries, and resuming a run that ended early."""
