"""Settings of `trainer`."""

from dataclasses import dataclass, field
from enum import Enum

from app.errors import expect


class Optimizer(Enum):
    adamw = "adamw"
    sgd = "sgd"


@dataclass
class TrainerConfig:
    lr: float = 1e-6
    warmup_steps: int = 0  # optimizer updates of linear warm-up; constant afterwards
    optimizer: Optimizer = Optimizer.adamw
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.98
    max_grad_norm: float = 1.0  # gradient norm is clipped to this
    tokens_per_microbatch: int = 8192  # prompt and completion tokens per rank and pass; longer trajectories go alone
    activation_checkpointing: bool = False
    max_skipped_updates: int = 3  # in a row, for gradients that are not finite; then the run stops
    timeout_s: float = 1800.0  # for one call to the ranks
    profile_steps: list[int] = field(default_factory=list)  # torch profiler traces of these steps; none by default


def validate(config: TrainerConfig) -> None:
    name = "trainer."
    expect(config.lr > 0, name + "lr", config.lr, "a number above 0")
    expect(config.warmup_steps >= 0, name + "warmup_steps", config.warmup_steps, "a whole number of at least 0")
    expect(config.weight_decay >= 0, name + "weight_decay", config.weight_decay, "a number of at least 0")
    for key in ("beta1", "beta2"):
        expect(0 <= getattr(config, key) < 1, name + key, getattr(config, key), "a number of at least 0 and below 1")
    expect(config.max_grad_norm > 0, name + "max_grad_norm", config.max_grad_norm, "a number above 0")
    for key in ("tokens_per_microbatch", "max_skipped_updates"):
        expect(getattr(config, key) >= 1, name + key, getattr(config, key), "a whole number of at least 1")
    expect(config.timeout_s > 0, name + "timeout_s", config.timeout_s, "a number of seconds above 0")
