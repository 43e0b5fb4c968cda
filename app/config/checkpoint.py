"""Settings of `checkpoint`."""

from dataclasses import dataclass

from app.errors import expect


@dataclass
class CheckpointConfig:
    every: int = 0  # steps; 0 saves none
    keep: int = 2  # newest checkpoints kept; one more is on the disk while it is written
    grace_s: float = 25.0  # for a last checkpoint after SIGINT or SIGTERM
    export: bool = False  # at the end, also write a Hugging Face directory: export/


def validate(config: CheckpointConfig) -> None:
    expect(config.every >= 0, "checkpoint.every", config.every, "a whole number of at least 0")
    expect(config.grace_s > 0, "checkpoint.grace_s", config.grace_s, "a number of seconds above 0")
    expect(config.keep >= 1, "checkpoint.keep", config.keep, "a whole number of at least 1")
