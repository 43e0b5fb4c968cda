"""Settings of `tracking=`. `metrics.jsonl`, `summary.json` and the console are always on."""

from dataclasses import dataclass
from typing import Any

from app.config.setting import is_dotted_path, setting
from app.errors import expect

TRACKERS = ("tensorboard", "wandb", "clearml", "prometheus")
ACCEPTED = f"a list of {', '.join(TRACKERS)}, and paths of your own such as my_module.MyTracker"


@dataclass
class TrackingConfig:
    """Dashboards and samples."""

    use: list[str] = setting([], "Trackers beside the console and the run's folder.", noun=ACCEPTED)
    args: dict[str, Any] = setting({}, "Keyword arguments of your own tracker.")
    project: str = setting("hydra-posttrain", "Project name in wandb and clearml.")
    run_name: str | None = setting(None, "Run name in trackers; null joins the names of the run folder and its parent.")
    offline: bool = setting(False, "wandb and clearml record into the run's folder and send nothing.")
    port: int = setting(
        9464, "Port at which prometheus serves /metrics; 0 takes a free one, in the log.", at_least=0, at_most=65535
    )
    compare: list[str] = setting(
        [], "mode=report: the runs, or folders of runs, to compare in one report.", noun="a list of folders"
    )
    samples_per_step: int = setting(8, "Trajectories written to samples/ per step; 0 writes none.", at_least=0)

    @property
    def own(self) -> list[str]:
        return [name for name in self.use if name not in TRACKERS]

    def validate(self) -> None:
        expect(bool(self.project.strip()), "tracking.project", self.project, "a name")
        for name in self.use:
            expect(name in TRACKERS or is_dotted_path(name), "tracking.use", name, ACCEPTED)
            expect(self.use.count(name) == 1, "tracking.use", self.use, f"each tracker once; {name} is repeated")
        expect(bool(self.own) or not self.args, "tracking.args", self.args, "{} without a tracker of your own")
