"""Settings of `tracking=`. `metrics.jsonl`, `summary.json` and the console are always on."""

from dataclasses import dataclass, field

from app.errors import expect


@dataclass
class TrackingConfig:
    use: list[str] = field(default_factory=list)  # further trackers: tensorboard, wandb, clearml
    project: str = "hydra-posttrain"
    run_name: str | None = None  # null: the run folder's name and its parent's
    offline: bool = False  # wandb and clearml record in the run folder and send nothing
    samples_per_step: int = 8  # trajectories written to samples/; 0 writes none


def validate(config: TrackingConfig) -> None:
    expect(
        config.samples_per_step >= 0,
        "tracking.samples_per_step",
        config.samples_per_step,
        "a whole number of at least 0",
    )
    known = ("tensorboard", "wandb", "clearml")
    for name in config.use:
        expect(name in known, "tracking.use", name, f"a list of {', '.join(known)}")
