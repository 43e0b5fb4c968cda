"""Rollout: the rollouter asks engines (`engine/`) for groups, plays episodes (`episodes/`) and scores completions."""
