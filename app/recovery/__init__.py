"""What keeps a run alive: engine restarts, repeated weight syncs, and resuming a run that ended early."""
