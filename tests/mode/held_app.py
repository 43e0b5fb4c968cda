"""The application whose training records one step and lasts until the file `go` exists; Hydra's clock stands still."""

from datetime import datetime
from pathlib import Path

import hydra.core.utils

from app import main
from app.config import RunConfig
from app.mode import ModeResult, train
from app.start.inputs import RunInputs
from app.tracking.recorder import RunFolderRecorder
from tests.waiting import until

DEADLINE_S = 300.0


class StoppedClock:
    """Stands in for `datetime` in Hydra's `${now:}`."""

    @staticmethod
    def now() -> datetime:
        return datetime(2026, 1, 2, 3, 4, 5)


def run(config: RunConfig, folder: Path, _inputs: RunInputs) -> ModeResult:
    """Record a step and wait for `go`."""
    with RunFolderRecorder(config, folder) as recorder:
        recorder.log(1, {"lr": config.trainer.lr, "time/step": 1.0})
        until(Path("go").exists, DEADLINE_S)
    return ModeResult(0.5)


if __name__ == "__main__":
    vars(hydra.core.utils)["datetime"] = StoppedClock
    vars(train)["run"] = run
    main.cli()
