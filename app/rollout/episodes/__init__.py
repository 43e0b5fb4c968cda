"""The driver's side of episodes: it plays the groups of an environment."""

from app.rollout.episodes.player import EpisodeLimits, Episodes, Play

__all__ = ["EpisodeLimits", "Episodes", "Play"]
