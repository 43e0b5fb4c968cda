"""Settings of `offload`, for placements in which trainer and engine share devices."""

from dataclasses import dataclass


@dataclass
class OffloadConfig:
    engine: bool = True  # the engine releases its device memory while the trainer trains
    trainer: bool = True  # the trainer's device memory goes to the host while the engine generates
