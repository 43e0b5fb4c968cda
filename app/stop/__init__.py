"""Early stop: the end of a run before its last step, by its evaluations."""
