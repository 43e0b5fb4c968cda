"""The comparison of several runs, as a sweep and `mode=report` end with it: the page, two CSV files and the screen.

`runs.csv` has a row for each run. `seeds.csv` has a row for each setting: mean and sample standard deviation over the
seeds of its finished runs.
"""

from collections.abc import Sequence
from pathlib import Path

from app.tracking.report.comparison import compare
from app.tracking.report.comparison_table import run_table, screen, seed_table
from app.tracking.report.data import find_runs, read_run
from app.tracking.report.page import NAME, write_page
from app.utils.files import replace_file

RUNS = "runs.csv"
SEEDS = "seeds.csv"


def write_comparison(folders: Sequence[Path], out: Path) -> list[str]:
    """Write `report.html`, `runs.csv` and, if a setting ran with several seeds, `seeds.csv` into the folder `out`.

    Returns:
        Lines for the screen: the tables, and the files.
    """
    comparison = compare([read_run(folder) for folder in folders])
    write_page(comparison, out / NAME)
    replace_file(out / RUNS, run_table(comparison).csv)
    if seeds := seed_table(comparison):
        replace_file(out / SEEDS, seeds.csv)
    return [*screen(comparison), "", f"report: {out / NAME}", f"tables: {out / RUNS}"]


def end_sweep(folder: Path) -> list[str]:
    """Compare the jobs in a sweep's folder, those that did not start included; do nothing if none did."""
    if not any(folder.glob("*/summary.json")):
        return []
    runs = find_runs(folder)
    # Launchers keep files in hidden folders.
    jobs = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    other = [job for job in jobs if not any(run.is_relative_to(job) for run in runs)]
    return [str(folder), *write_comparison([*runs, *other], folder)]
