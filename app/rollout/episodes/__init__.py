"""The driver's side of episodes: it plays the groups of an environment."""

from app.rollout.episodes.attempt import EpisodeLimits
from app.rollout.episodes.episode_group import GroupSpec, episode_failures
from app.rollout.episodes.player import Episodes

__all__ = ["EpisodeLimits", "Episodes", "GroupSpec", "episode_failures"]
