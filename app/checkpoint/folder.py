"""Reading a run's `checkpoints/`: which are complete, the latest and the best, and which a run can be resumed from."""

from dataclasses import dataclass
from pathlib import Path

from app.checkpoint.run_state import STATE, RunState, read_intact
from app.errors import CheckpointError, DamagedCheckpoint

FOLDER, LATEST, BEST, ASIDE = "checkpoints", "latest", "best", "aside"


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """An intact checkpoint to continue from."""

    path: Path
    state: RunState
    damaged: tuple[str, ...] = ()  # why each newer checkpoint was stepped over


def latest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint of a run, or None; `DamagedCheckpoint` if `latest` names a missing one."""
    return _existing(folder / FOLDER / LATEST)


def best(folder: Path) -> Path | None:
    """Return the checkpoint with the highest accuracy of the run in `folder`, or None. Raises like `latest`."""
    return _existing(folder / FOLDER / BEST)


def named(path: Path) -> Path | None:
    """Return the checkpoint that `<run>/checkpoints/<name>` is, or that it names as latest or best; None if neither."""
    if path.parent.name != FOLDER:
        return None
    return _pointed_at_by(path) or (path if path.is_dir() else None)


def find(path: Path) -> Path | None:
    """Return the checkpoint that `path` is or names as latest or best, or the latest of the run at `path`, or None."""
    return path if (path / STATE).is_file() else _pointed_at_by(path) or latest(path)


def list_checkpoints(path: Path) -> str:
    """Say which checkpoints there are, of the run at `path` or beside `path`: "step_20, step_25 are there"."""
    folder = path.parent if path.parent.name == FOLDER else path / FOLDER
    names = [checkpoint.name for checkpoint in complete(folder)]
    if not names:
        return f"{folder.parent} has no checkpoint"
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} there"


def intact(path: Path) -> ResumePoint:
    """Return the checkpoint at `path` after reading all its files. Raises like `read_intact`."""
    if not _is_checkpoint(path):
        raise CheckpointError(f"{path} is not a complete checkpoint of a run: give one named step_N")
    return ResumePoint(path, read_intact(path))


def newest_intact(folder: Path) -> ResumePoint | None:
    """Return the latest checkpoint of the run in `folder`, or if it is damaged the newest intact one before it.

    Raises:
        DamagedCheckpoint: Every checkpoint is damaged.
        CheckpointError: One of them has a format that this version does not read.
    """
    checkpoints = folder / FOLDER
    newest = _named_by(checkpoints / LATEST)
    if newest is None:
        return None

    damaged: list[str] = []
    older = [checkpoint for checkpoint in complete(checkpoints) if step_of(checkpoint) < step_of(newest)]
    for checkpoint in (newest, *reversed(older)):
        try:
            return ResumePoint(checkpoint, read_intact(checkpoint), tuple(damaged))
        except DamagedCheckpoint as error:
            damaged.append(str(error))
    raise DamagedCheckpoint(f"{damaged[0]}; no other checkpoint in {checkpoints} is intact")


def complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    return sorted(filter(_is_checkpoint, folder.glob("step_*")), key=step_of)


def _is_checkpoint(path: Path) -> bool:
    return path.name.startswith("step_") and path.name[5:].isdecimal()


def step_of(path: Path) -> int:
    """Return N of `step_N`."""
    return int(path.name.removeprefix("step_"))


def _pointed_at_by(path: Path) -> Path | None:
    """Return the checkpoint that `checkpoints/latest` or `checkpoints/best` names; None if `path` is neither."""
    return _existing(path) if path.parent.name == FOLDER and path.name in (LATEST, BEST) else None


def _existing(pointer: Path) -> Path | None:
    path = _named_by(pointer)
    if path is not None and not path.is_dir():
        raise DamagedCheckpoint(f"checkpoint {path}, named by {pointer}, is missing; give resume=<path> of another one")
    return path


def _named_by(pointer: Path) -> Path | None:
    """Return the checkpoint that `latest` or `best` names, whether it exists or not; None without the pointer."""
    try:
        path = pointer.parent / pointer.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{pointer} cannot be read: {error}") from error
    if not _is_checkpoint(path):
        raise CheckpointError(f"{pointer} is damaged: it names no step_N; give resume=<path> of a checkpoint")
    return path
