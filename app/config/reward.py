"""Settings of `reward=`: weighted built-in components, or a callable of your own."""

import math
from dataclasses import dataclass
from typing import Any

from app.config.setting import SECONDS, setting
from app.errors import expect

BUILT_IN = ("exact", "format", "math")  # each is a module of `app.reward`


@dataclass
class RewardConfig:
    """The reward function and its worker processes."""

    _target_: str | None = setting(
        None,
        "Dotted path of your own reward function or class; it replaces the components.",
        noun="a path such as my_package.my_module.my_reward",
    )
    args: dict[str, Any] = setting(
        {}, "Keyword arguments of reward._target_.", noun="entries as in +reward.args.scale=0.5"
    )
    components: dict[str, float] = setting(
        {},
        "Weights of the built-in components; weight 0 measures a component without rewarding it.",
        noun=f"weights of {', '.join(BUILT_IN)}, as in +reward.components.format=0.1",
    )
    workers: int = setting(1, "Worker processes.", at_least=1)
    timeout_s: float = setting(
        5.0,
        "Deadline per trajectory; a call that scores several has their sum, and is repeated for each trajectory alone "
        "when it exceeds that; a trajectory that exceeds the deadline alone has reward 0.",
        above=0,
        noun=SECONDS,
    )
    max_failed_fraction: float = setting(
        0.2, "Share of a step's trajectories whose scoring may fail; above it the run stops.", at_least=0, at_most=1
    )

    def validate(self) -> None:
        """Raise `ConfigError` for unknown components, a malformed path, or arguments without a callable."""
        target = self._target_
        expect(
            target is not None or bool(self.components),
            "reward.components",
            "{}",
            "at least one component with its weight",
        )

        for name, weight in self.components.items():
            expect(
                name in BUILT_IN,
                "reward.components",
                name,
                f"components among {', '.join(BUILT_IN)}, or your own by _target_",
            )
            expect(math.isfinite(weight), f"reward.components.{name}", weight, "a finite weight")

        expect(
            target is None or ("." in target.strip(".") and ".." not in target),
            "reward._target_",
            target,
            "the dotted path of a function or class, such as my_package.my_module.my_reward",
        )
        expect(target is not None or not self.args, "reward.args", self.args, "{} without reward._target_")
