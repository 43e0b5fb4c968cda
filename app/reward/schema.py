"""Settings of `reward=`: weighted built-in parts, or a user's own callable."""

from dataclasses import dataclass, field

from app.errors import expect


@dataclass
class RewardConfig:
    _target_: str | None = None  # a user's own `package.function`; then `parts` is not used
    parts: dict[str, float] = field(default_factory=dict)  # built-in name → weight
    workers: int = 1  # processes
    timeout_s: float = 5.0  # per trajectory; a hung worker is killed and its trajectory scores 0
    max_failed_fraction: float = 0.2  # of a step's trajectories; above it the run stops


def validate(config: RewardConfig) -> None:
    expect(config._target_ is not None or bool(config.parts), "reward.parts", "{}", "at least one part with its weight")
    expect(config.workers >= 1, "reward.workers", config.workers, "a whole number of at least 1")
    expect(config.timeout_s > 0, "reward.timeout_s", config.timeout_s, "a number of seconds above 0")
    expect(
        0 <= config.max_failed_fraction <= 1,
        "reward.max_failed_fraction",
        config.max_failed_fraction,
        "a number from 0 to 1",
    )
