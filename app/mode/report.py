"""`mode=report`: write `report.html` of a run, of a folder of runs, or of the runs that `tracking.compare` lists.

Another process may be writing the run. Its folder is left alone then, and the report is written beside it.
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from app.config import RunConfig
from app.config.resolvers import RUN_ID
from app.errors import ConfigError, echo, expect
from app.mode import ModeResult
from app.recovery.run_lock import FolderInUse, is_abandoned, run_lock
from app.tracking.report.comparison import compare, run_table, screen, seed_table
from app.tracking.report.data import RunData, find_runs, read_run
from app.tracking.report.page import NAME, write_page
from app.tracking.run_folder.summary import Status
from app.utils.files import replace_file

COMPARISONS = Path("outputs/comparisons")
RUNS = "runs.csv"
SEEDS = "seeds.csv"


def run(config: RunConfig, folder: Path | None) -> ModeResult:
    """Write the report and print its path, and the tables of a comparison. Raises `ConfigError` without any run."""
    if config.tracking.compare:
        echo("\n".join(_comparison(config.tracking.compare, folder)))
        return ModeResult()

    runs = [] if folder is None else find_runs(folder)
    if folder is None or not runs:
        accepted = "a run's or a sweep's folder, or list runs in tracking.compare"
        raise ConfigError("hydra.run.dir", folder, accepted, "a report needs at least one run folder")

    if runs != [folder]:
        echo("\n".join(write_comparison(runs, folder)))
        return ModeResult()
    abandoned = is_abandoned(folder)  # before the lock is ours
    try:
        with run_lock(folder):
            echo(str(write_page(compare([_read(folder, abandoned)]), folder / NAME)))
    except FolderInUse:
        echo(str(write_page(compare([read_run(folder)]), folder.with_name(f"{folder.name}.{NAME}"))))
    return ModeResult()


def _read(folder: Path, abandoned: bool) -> RunData:
    """Read a run folder. A killed run's summary still says `running`; `abandoned` tells it from one in progress."""
    run = read_run(folder)
    killed = abandoned and run.summary.get("status") == Status.running.value
    return replace(run, summary={**run.summary, "status": "killed"}) if killed else run


def _comparison(compared: Sequence[str], folder: Path | None) -> list[str]:
    """Compare the runs in these folders; the files go to `folder`, or to a new one. Returns lines for the screen."""
    runs: dict[Path, Path] = {}  # by its real folder, so that a run counts once
    for each in compared:
        found = find_runs(Path(each))
        expect(bool(found), "tracking.compare", each, "folders of runs; it holds none")
        runs.update({run.resolve(): run for run in found})

    if folder is None:
        folder = COMPARISONS / f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{RUN_ID}"
    expect(find_runs(folder) != [folder], "hydra.run.dir", folder, "a folder that is not a run's, for the comparison")
    return write_comparison(list(runs.values()), folder)


def write_comparison(folders: Sequence[Path], out: Path) -> list[str]:
    """Write `report.html`, `runs.csv` and, if a setting ran with several seeds, `seeds.csv` into the folder `out`.

    `runs.csv` has a row for each run. `seeds.csv` has a row for each setting: mean and sample standard deviation over
    the seeds of its finished runs. Returns lines for the screen: the tables, and the files.
    """
    comparison = compare([_read(folder, is_abandoned(folder)) for folder in folders])
    write_page(comparison, out / NAME)
    replace_file(out / RUNS, run_table(comparison).csv)
    if seeds := seed_table(comparison):
        replace_file(out / SEEDS, seeds.csv)
    return [*screen(comparison), "", f"report: {out / NAME}", f"tables: {out / RUNS}"]


def end_sweep(folder: Path, before: Collection[Path] = ()) -> tuple[list[str], bool]:
    """Compare the jobs in a sweep's folder, those that did not start included; do nothing if none did.

    Returns lines for the screen, and whether all have finished, but for what is in folders that were there `before`:
    launchers that run jobs in parallel do not say.
    """
    if not any(folder.glob("*/summary.json")):
        return [], True
    runs = find_runs(folder)
    # Launchers keep files in hidden folders.
    jobs = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    other = [job for job in jobs if not any(run.is_relative_to(job) for run in runs)]
    jobs = [*runs, *other]
    own = [job for job in jobs if not any(job.is_relative_to(each) for each in before)]
    finished = all(read_run(job).summary.get("status") == Status.finished.value for job in own)
    return [str(folder), *write_comparison(jobs, folder)], finished
