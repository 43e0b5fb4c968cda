"""Settings of `trainer`."""

from dataclasses import dataclass
from enum import Enum

from app.config.setting import SECONDS, setting


class Optimizer(Enum):
    """The optimizer's update rule."""

    adamw = "adamw"
    sgd = "sgd"


class Schedule(Enum):
    """Learning rate after warm-up."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class Checkpointing(Enum):
    """How much of each decoder layer the backward pass recomputes, from nothing to all of it."""

    none = "none"
    matmuls = "matmuls"  # all but the results of matrix products and of attention
    attention = "attention"  # all but the result of attention
    all = "all"
    auto = "auto"  # the least of them that fits


class Compile(Enum):
    """Whether torch compiles the elementwise parts of the model."""

    auto = "auto"
    on = "on"
    off = "off"


@dataclass
class TrainerConfig:
    """Optimizer, microbatches and deadlines of the FSDP2 trainer."""

    lr: float = setting(1e-6, "Learning rate at the end of the warm-up, where trainer.schedule begins.", above=0)
    lr_scale: float = setting(1.0, "Factor of trainer.lr, to sweep around the learning rate of a preset.", above=0)
    warmup_steps: int = setting(0, "Optimizer updates of linear learning-rate warm-up.", at_least=0)
    schedule: Schedule = setting(
        Schedule.constant, "After warm-up: constant, or a linear or cosine decay over the remaining optimizer updates."
    )
    lr_min_fraction: float = setting(0.0, "Fraction of trainer.lr at which a decay ends.", at_least=0, at_most=1)
    optimizer: Optimizer = setting(
        Optimizer.adamw, "AdamW with betas 0.9 and 0.98, or SGD, which keeps no optimizer state."
    )
    weight_decay: float = setting(0.1, "Decoupled weight decay.", at_least=0)
    max_grad_norm: float = setting(1.0, "The gradient norm is clipped to this.", above=0, infinite=True)
    tokens_per_microbatch: int = setting(
        8192, "Tokens per rank in one forward-backward pass; a longer trajectory gets its own.", at_least=1
    )
    activation_checkpointing: Checkpointing = setting(
        Checkpointing.auto,
        "How much of each layer the backward pass recomputes: none, all, all but attention (attention), or all but "
        "attention and matrix products (matmuls); auto is the least that leaves a tenth of the device's memory free.",
    )
    replicas: int = setting(
        1,
        "Copies of the sharded model (HSDP): each is sharded over trainer ranks / replicas consecutive ranks, such as "
        "those of a machine, and only gradients are averaged over the copies, once in an update.",
        at_least=1,
    )
    compile: Compile = setting(
        Compile.auto, "torch.compile of norms, gates and the LM head's loss; auto compiles where a device gains by it."
    )
    timeout_s: float = setting(1800.0, "Deadline of one call to the trainer ranks.", above=0, noun=SECONDS)
    profile_steps: list[int] = setting(
        [], "Steps to record with the torch profiler, one trace per rank.", noun="a list of steps"
    )

    @property
    def peak_lr(self) -> float:
        return self.lr * self.lr_scale
