"""The checkpoints of a run, from the driver: which are complete, which is the latest, which get deleted.

    checkpoints/step_N.tmp/   being written: the ranks' files, then state.json
    checkpoints/step_N/       complete
    checkpoints/latest        text file with the name of the newest complete one

A checkpoint is committed in this order:

    1. The ranks write their files and flush them to disk.
    2. state.json lists all files with their sizes; it and the folder are flushed.
    3. step_N.tmp is renamed to step_N, and the rename is flushed.
    4. `latest` is replaced atomically, and the replacement is flushed.
    5. Checkpoints beyond the newest `keep` are deleted, each renamed to *.tmp first.

Invariants:
- Only names without .tmp are complete. The one that `latest` names survives a crash of the machine.
- An older checkpoint is deleted only after a newer one is `latest`.
- A failure at any moment, `kill -9` included, leaves the previous checkpoint untouched.

With several nodes, all of them must see the folder.
"""

import asyncio
import contextlib
import json
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from app.errors import CheckpointError, ConfigError
from app.utils import files
from app.utils.files import UNFINISHED
from app.utils.units import GIB

FOLDER, LATEST, STATE = "checkpoints", "latest", "state.json"
FORMAT = 1
OVERHEAD = 1.02  # bytes on disk over bytes of tensors: names, headers, random state


@dataclass(frozen=True, slots=True)
class RunState:
    """The driver's share of a checkpoint. JSON-serializable."""

    step: int  # finished steps
    version: int  # policy version
    extra: Mapping[str, Any] = field(default_factory=dict)  # the caller's: prompt cursor, unfinished prompts, …
    model: Mapping[str, Any] = field(default_factory=dict)  # `app.model.hf_directory.identity` of the source model


class Savable(Protocol):
    """The methods of `Trainer` that `CheckpointManager` calls."""

    async def checkpoint_bytes(self) -> int: ...

    async def capture(self) -> int: ...

    async def write(self, folder: Path) -> None: ...


class CheckpointManager:
    """Writes and deletes the checkpoints of one run, one at a time.

    Example::

        checkpoints = CheckpointManager(run_folder, keep=2)
        checkpoints.prepare(await trainer.checkpoint_bytes())
        await checkpoints.save(trainer, RunState(step=10, version=10))   # returns once the state is captured
        ...                                                              # training continues
        await checkpoints.wait()                                         # step_10 is committed

    Args:
        folder: The run's folder.
        keep: Newest checkpoints that are kept. While one is written there is one more.
        timeout_s: Deadline of a write, in seconds.
    """

    def __init__(self, folder: Path, keep: int, *, timeout_s: float = 1800.0):
        self.folder = folder / FOLDER
        self.keep = keep
        self.timeout_s = timeout_s
        self._writing: asyncio.Task[None] | None = None
        self._committed: Path | None = None
        self._metrics: dict[str, float] = {}

    @property
    def metrics(self) -> dict[str, float]:
        """Bytes and blocked seconds of the newest checkpoint, and its write seconds once it is committed."""
        return dict(self._metrics)

    def prepare(self, checkpoint_bytes: int) -> None:
        """Remove unfinished checkpoints, and check that the folder is writable and has enough space.

        Raises:
            ConfigError: The folder is not writable, or `keep` + 1 checkpoints do not fit.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for unfinished in self.folder.glob(f"*{UNFINISHED}"):
                files.remove(unfinished)
            probe = self.folder / f"probe{UNFINISHED}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"{self.folder} cannot hold checkpoints: {files.describe(error)}; set hydra.run.dir to a writable "
                "folder."
            ) from error

        used = sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())
        available = shutil.disk_usage(self.folder).free + used
        if available < int((self.keep + 1) * checkpoint_bytes * OVERHEAD):
            raise ConfigError(
                f"checkpoint.keep={self.keep} is not accepted: {self.keep + 1} checkpoints of "
                f"{checkpoint_bytes / GIB:.1f} GiB do not fit into the {available / GIB:.1f} GiB available in "
                f"{self.folder}; give a smaller number, or another hydra.run.dir."
            )

    async def save(self, trainer: Savable, state: RunState) -> Path:
        """Capture a checkpoint and start writing it in the background.

        Waits for the previous write first. A step that this object committed is not saved again.

        Returns:
            The checkpoint's folder, which exists once it is committed.

        Raises:
            CheckpointError: The previous write failed, or there is not enough space.
        """
        started = time.perf_counter()
        await self.wait()

        final = self.folder / f"step_{state.step}"
        if final == self._committed:
            return final

        writing = final.with_name(final.name + UNFINISHED)
        await asyncio.to_thread(self._create_folder, writing, await trainer.checkpoint_bytes())
        captured = await trainer.capture()
        self._metrics = {"checkpoint/blocked_s": time.perf_counter() - started, "checkpoint/bytes": float(captured)}
        self._writing = asyncio.create_task(self._write(trainer, state, writing, final))
        return final

    async def wait(self) -> None:
        """Wait until the last checkpoint is committed. Its error is raised once."""
        task = self._writing
        if task is None:
            return

        done, _ = await asyncio.wait({task}, timeout=self.timeout_s)
        self._writing = None
        if not done:
            task.cancel()
            raise CheckpointError(f"a checkpoint in {self.folder} was not written within {self.timeout_s:.0f} s")
        task.result()

    async def settle(self, seconds: float) -> None:
        """After a failure of the run: give the last checkpoint this many seconds to finish, then cancel it."""
        task = self._writing
        self._writing = None
        if task is not None:
            await asyncio.wait({task}, timeout=seconds)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def latest(self) -> Path | None:
        return latest(self.folder.parent)

    def read_state(self, path: Path) -> RunState:
        return read_state(path)

    def rewind(self, path: Path) -> None:
        """Make this checkpoint the latest and delete the later ones."""
        with _explained(path, "be rewound to"):
            self._set_latest(path)
            for checkpoint in _complete(self.folder):
                if _step(checkpoint) > _step(path):
                    files.delete(checkpoint)
        self._committed = path

    # --- the background write

    def _create_folder(self, writing: Path, checkpoint_bytes: int) -> None:
        with _explained(writing, "be started"):
            self.folder.mkdir(parents=True, exist_ok=True)
            files.remove(writing)
            needed = checkpoint_bytes * OVERHEAD
            free = shutil.disk_usage(self.folder).free
            if free < needed:
                raise CheckpointError(
                    f"checkpoint {_final_name(writing)} cannot be started: it needs {needed / GIB:.2f} GiB, and "
                    f"{self.folder} has {free / GIB:.2f} GiB left"
                )
            writing.mkdir()

    async def _write(self, trainer: Savable, state: RunState, writing: Path, final: Path) -> None:
        started = time.perf_counter()
        try:
            await trainer.write(writing)
            await asyncio.to_thread(self._commit, state, writing, final)
        except BaseException:
            # An error of the cleanup must not hide the first one.
            with contextlib.suppress(OSError):
                files.remove(writing)
            raise
        self._metrics["checkpoint/write_s"] = time.perf_counter() - started
        self._committed = final

    def _commit(self, state: RunState, writing: Path, final: Path) -> None:
        with _explained(writing, "be written"):
            sizes = {file.name: file.stat().st_size for file in writing.iterdir()}
            body = {"format": FORMAT, **asdict(state), "files": sizes}
            files.write(writing / STATE, json.dumps(body, indent=1) + "\n")
            files.sync(writing)

            # A rewound run may have left a checkpoint of this step.
            if final.exists():
                files.delete(final)
            writing.rename(final)
            files.sync(self.folder)

            self._set_latest(final)
            for old in _complete(self.folder)[: -self.keep]:
                if old != final:
                    files.delete(old)

    def _set_latest(self, path: Path) -> None:
        """Make `latest` name this checkpoint, atomically."""
        files.replace_file(self.folder / LATEST, path.name + "\n", durable=True)


def latest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint of the run in `folder`, or None.

    Raises:
        CheckpointError: `latest` names a checkpoint that does not exist.
    """
    pointer = folder / FOLDER / LATEST
    if not pointer.is_file():
        return None
    path = pointer.with_name(pointer.read_text().strip())
    if not path.is_dir():
        raise CheckpointError(f"checkpoint {path}, named by {pointer}, is missing; give resume=<path> of another one")
    return path


def find(path: Path) -> Path | None:
    """Return the checkpoint at `path`, or the latest one of the run at `path`, or None."""
    return path if (path / STATE).is_file() else latest(path)


def read_state(path: Path) -> RunState:
    """Read the driver's share of a checkpoint, and check that all its files are there.

    Raises:
        CheckpointError: state.json is missing, damaged or of another format, or a file is missing or has another size.
    """
    try:
        body = json.loads((path / STATE).read_text())
        sizes = dict(body.pop("files"))
        format_version = body.pop("format")
        state = RunState(**body)
    except OSError as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {files.describe(error)}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {STATE} is damaged ({error})") from error

    if format_version != FORMAT:
        raise CheckpointError(f"checkpoint {path} has format {format_version}; this version reads format {FORMAT}")
    for name, size in sizes.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"checkpoint {path} is incomplete: {name} is missing")
        if file.stat().st_size != size:
            raise CheckpointError(
                f"checkpoint {path} is incomplete: {name} has {file.stat().st_size} bytes instead of {size}"
            )
    return state


def require_model(state: RunState, model: Mapping[str, Any], path: Path) -> None:
    """Raise `CheckpointError` unless the checkpoint at `path` is of this model.

    Args:
        state: The checkpoint's.
        model: `identity` of this model. The location of its source is not compared.
        path: For the message.
    """
    for key in sorted(model.keys() | state.model.keys()):
        ours = model.get(key)
        theirs = state.model.get(key)
        if key != "source" and ours != theirs:
            raise CheckpointError(
                f"checkpoint {path} is of another model: its {key} is {theirs}, this model's is {ours}"
            )


def _complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    return sorted((path for path in folder.glob("step_*") if path.name[5:].isdecimal()), key=_step)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _final_name(writing: Path) -> Path:
    return writing.with_name(writing.name.removesuffix(UNFINISHED))


@contextlib.contextmanager
def _explained(path: Path, action: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"checkpoint {_final_name(path)} cannot {action}: {files.describe(error)}") from error
