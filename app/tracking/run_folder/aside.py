"""Records that a run does not continue from: they are moved to `aside_<n>/` in the run's folder and keep their names.

Two cases: a run that is resumed from an earlier step than it had reached, and a run that starts over because it ended
before its first checkpoint. Nothing is deleted.
"""

from pathlib import Path

from app.tracking.run_folder import CONFIG, PROMPTS, WARNINGS, metrics_file, samples, summary, timeline

PREFIX = "aside_"
STEPPED = (metrics_file.NAME, PROMPTS, WARNINGS)  # one JSON object with a `step` per line
ALL = (
    metrics_file.NAME,
    PROMPTS,
    samples.FOLDER,
    summary.NAME,
    timeline.NAME,
    "report.html",
    CONFIG,
    "export",
    "final",
    "logs",
    "profile",
    "tracking",
)


def is_aside(path: Path) -> bool:
    """Whether a path is, or is below, a folder of records that were set aside."""
    return any(part.startswith(PREFIX) and part.removeprefix(PREFIX).isdecimal() for part in path.parts)


def set_all_aside(folder: Path) -> Path:
    """Move all records of the run in `folder`. Returns where to."""
    aside = _next(folder)
    aside.mkdir()
    for name in ALL:
        if (folder / name).exists():
            (folder / name).rename(aside / name)
    return aside


def set_later_aside(folder: Path, step: int) -> Path | None:
    """Move the records of steps after `step`. Returns where to, or None if there are none."""
    aside = _next(folder)
    for name in STEPPED:
        metrics_file.move_after(folder / name, step, aside / name)
    samples.move_after(folder, step, aside)
    return aside if aside.exists() else None


def _next(folder: Path) -> Path:
    """Return the first unused name."""
    used = [int(path.name.removeprefix(PREFIX)) for path in folder.glob(f"{PREFIX}*") if is_aside(Path(path.name))]
    return folder / f"{PREFIX}{max(used, default=0) + 1}"
