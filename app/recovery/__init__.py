"""Failure recovery: engine restarts, weight sync retries, and resuming a run that ended early.

The trainer is started again by `app/mode/train.py`, which creates it (`recovery.max_restarts`).
"""
