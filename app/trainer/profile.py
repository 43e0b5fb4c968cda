"""`trainer.profile_steps=[10,11]`: torch profiler traces of these steps, one file a rank, in the run's folder."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

FOLDER = "profile"


class StepProfiler:
    """Around begin and finish of a step; off for every step that was not asked for."""

    def __init__(self, steps: Sequence[int], folder: Path, rank: int):
        self.steps, self.folder, self.rank = frozenset(steps), folder, rank
        self._running: profile | None = None

    def begin(self, step: int) -> None:
        if step in self.steps:
            # an accelerator's own activities where this torch knows them
            known = [activity for activity in ProfilerActivity.__members__.values() if _supported(activity)]
            self._running = profile(activities=known)
            self._running.start()

    def finish(self, step: int) -> None:
        """Write `profile/step_N_rank_R.json`, a Chrome trace."""
        if self._running is not None:
            running, self._running = self._running, None
            running.stop()
            self.folder.mkdir(parents=True, exist_ok=True)
            running.export_chrome_trace(str(self.folder / f"step_{step}_rank_{self.rank}.json"))

    def abort(self) -> None:
        if self._running is not None:
            self._running.stop()
            self._running = None


def _supported(activity: ProfilerActivity) -> bool:
    return activity in torch.profiler.supported_activities()
