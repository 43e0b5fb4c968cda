"""Settings of `offload`, most of them for placements in which trainer and engines share devices."""

from dataclasses import dataclass
from enum import Enum

from app.config.setting import setting


class OptimizerOffload(Enum):
    """When the moments of AdamW are on the device."""

    step = "step"  # while the trainer trains
    update = "update"  # in an update of the parameters only
    auto = "auto"  # the former if that fits


@dataclass
class OffloadConfig:
    """Memory offload on accelerators: between trainer and engines in `placement=colocate`, and of the optimizer."""

    engine: bool = setting(True, "Engines release their device memory while the trainer trains.")
    trainer: bool = setting(True, "Trainer tensors are offloaded to host memory while the engines generate.")
    optimizer: OptimizerOffload = setting(
        OptimizerOffload.auto,
        "Adam's moments are on the device while the trainer trains (step), or in each update only and else in host "
        "memory (update), which leaves activations their room; auto is update where step does not fit.",
    )
