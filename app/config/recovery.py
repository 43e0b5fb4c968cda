"""Settings of `recovery`."""

from dataclasses import dataclass

from app.errors import expect


@dataclass
class RecoveryConfig:
    max_restarts: int = 3  # of the trainer, from its last checkpoint
    max_engine_failures: int = 5  # attempts of a prompt lost to engines, before the run stops
    max_prompt_retries: int = 2  # attempts of a prompt that fails by itself


def validate(config: RecoveryConfig) -> None:
    for key in ("max_restarts", "max_engine_failures", "max_prompt_retries"):
        expect(getattr(config, key) >= 0, f"recovery.{key}", getattr(config, key), "a whole number of at least 0")
