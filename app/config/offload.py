"""Settings of `offload`, for placements in which trainer and engines share devices."""

from dataclasses import dataclass

from app.config.setting import setting


@dataclass
class OffloadConfig:
    """Memory offload in `placement=colocate` on accelerators."""

    engine: bool = setting(True, "Engines release their device memory while the trainer trains.")
    trainer: bool = setting(True, "Trainer tensors are offloaded to host memory while the engines generate.")
