"""Rollout: the rollouter samples from engines (`engine/`), plays episodes (`episodes/`) and scores completions."""
