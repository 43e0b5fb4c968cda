"""Settings of `reward=`: weighted built-in components, or a user's own callable."""

import math
from dataclasses import dataclass, field
from typing import Any

from app.errors import expect

BUILT_IN = ("exact", "format", "math")  # each is the module of its name in this package


@dataclass
class RewardConfig:
    _target_: str | None = None  # a user's own `package.function` or `package.Class`; then `components` is not used
    args: dict[str, Any] = field(default_factory=dict)  # keyword arguments for a user's own
    components: dict[str, float] = field(default_factory=dict)  # built-in name → weight; 0 only measures it
    workers: int = 1  # processes
    timeout_s: float = 5.0  # per trajectory; a hung worker is killed and its trajectory scores 0
    max_failed_fraction: float = 0.2  # of a step's trajectories; above it the run stops


def validate(config: RewardConfig) -> None:
    expect(
        config._target_ is not None or bool(config.components),
        "reward.components",
        "{}",
        "at least one component with its weight",
    )
    for name, weight in config.components.items():
        expect(
            name in BUILT_IN,
            "reward.components",
            name,
            f"components among {', '.join(BUILT_IN)}, or your own by _target_",
        )
        expect(math.isfinite(weight), f"reward.components.{name}", weight, "a finite weight")
    target = config._target_
    expect(
        target is None or ("." in target.strip(".") and ".." not in target),
        "reward._target_",
        target,
        "the dotted path of a function or class, such as my_package.my_module.my_reward",
    )
    expect(config._target_ is not None or not config.args, "reward.args", config.args, "{} without reward._target_")
    expect(config.workers >= 1, "reward.workers", config.workers, "a whole number of at least 1")
    expect(config.timeout_s > 0, "reward.timeout_s", config.timeout_s, "a number of seconds above 0")
    expect(
        0 <= config.max_failed_fraction <= 1,
        "reward.max_failed_fraction",
        config.max_failed_fraction,
        "a number from 0 to 1",
    )
