"""Settings of `tracking=`. `metrics.jsonl`, `summary.json` and the console are always on."""

from dataclasses import dataclass

from app.config.setting import setting
from app.errors import expect

TRACKERS = ("tensorboard", "wandb", "clearml")


@dataclass
class TrackingConfig:
    """Dashboards and samples."""

    use: list[str] = setting(
        [], "Trackers beside the console and the run's folder.", noun=f"a list of {', '.join(TRACKERS)}"
    )
    project: str = setting("hydra-posttrain", "Project name in wandb and clearml.")
    run_name: str | None = setting(
        None, "Run name in the trackers; null joins the names of the run's folder and its parent."
    )
    offline: bool = setting(False, "wandb and clearml record into the run's folder and send nothing.")
    compare: list[str] = setting(
        [],
        "mode=report: the runs, or folders of runs, to compare in one report, which goes to hydra.run.dir or else to a "
        "new folder in outputs/comparisons.",
        noun="a list of folders",
    )
    samples_per_step: int = setting(8, "Trajectories written to samples/ per step; 0 writes none.", at_least=0)

    def validate(self) -> None:
        """Raise `ConfigError` for an unknown tracker."""
        for name in self.use:
            expect(name in TRACKERS, "tracking.use", name, f"a list of {', '.join(TRACKERS)}")
