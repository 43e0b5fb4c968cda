"""`trainer.profile_steps`: traces of steps by the torch profiler."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from app.types import StepReport


class StepProfiler:
    """Profiles from `begin` of the chosen steps to the end of their weight sync. Does nothing in other steps."""

    def __init__(self, steps: Sequence[int], folder: Path, rank: int, supervised: bool = False):
        self.steps = frozenset(steps)
        self.folder = folder
        self.rank = rank
        self.supervised = supervised  # no sync follows a step
        self._step = 0
        self._profile: profile | None = None

    def begin(self, step: int) -> None:
        self.finish()  # a step without a sync
        self._step = step
        if step in self.steps:
            # Includes the accelerator's activities if this torch supports them.
            supported = torch.profiler.supported_activities()
            activities = [activity for activity in ProfilerActivity.__members__.values() if activity in supported]
            self._profile = profile(activities=activities)
            self._profile.start()

    def after(self, report: StepReport) -> StepReport:
        """End the profile of a supervised step, and return its report."""
        if self.supervised:
            self.finish()
        return report

    def finish(self) -> None:
        """Write `profile/step_N_rank_R.json`, a Chrome trace."""
        finished = self.abort()
        if finished is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            finished.export_chrome_trace(str(self.folder / f"step_{self._step}_rank_{self.rank}.json"))

    def abort(self) -> profile | None:
        """Stop without a trace, and return what was recorded."""
        stopped, self._profile = self._profile, None
        if stopped is not None:
            stopped.stop()
        return stopped
