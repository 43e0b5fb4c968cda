"""The checkpoints of a run, as its driver sees them: when one is whole, which one is the latest, which are deleted.

    checkpoints/step_N.tmp/   being written: the ranks' files, then state.json
    checkpoints/step_N/       whole: renamed after every file was on the disk
    checkpoints/latest        a file with the name of the newest whole one, replaced after the rename

Always holds: what `latest` names is whole; an older checkpoint is deleted only after a newer one is `latest`; a failure
at any moment, kill -9 included, leaves the one before untouched. Several nodes need a folder that all of them see.
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
from app.utils import files as durable
from app.utils.files import UNFINISHED

FOLDER, LATEST, STATE = "checkpoints", "latest", "state.json"
FORMAT = 1
SPARE = 1.02  # of the bytes of tensors: names, headers, random numbers
GIB = 2**30


@dataclass(frozen=True, slots=True)
class RunState:
    """The driver's side of a checkpoint, as JSON can hold it."""

    step: int  # finished steps
    version: int  # policy version
    extra: Mapping[str, Any] = field(default_factory=dict)  # of whoever saves: cursor, unfinished prompts, …
    model: Mapping[str, Any] = field(default_factory=dict)  # `app.model.hf_directory.identity` of the source


class Savable(Protocol):
    """What `Checkpoints` needs of a trainer."""

    async def checkpoint_bytes(self) -> int: ...

    async def capture(self) -> int: ...

    async def write(self, folder: Path) -> None: ...


class Checkpoints:
    """Those of the run in `folder`, the newest `keep` of them. One is written at a time."""

    def __init__(self, folder: Path, keep: int, *, timeout_s: float = 1800.0):
        self.folder, self.keep, self.timeout_s = folder / FOLDER, keep, timeout_s
        self._writing: asyncio.Task[None] | None = None
        self._committed: Path | None = None
        self._metrics: dict[str, float] = {}

    @property
    def metrics(self) -> dict[str, float]:
        """Of the newest checkpoint: how long it held up training; once it was written, how long that took."""
        return dict(self._metrics)

    def prepare(self, checkpoint_bytes: int) -> None:
        """Before a run: remove what was left unfinished; raise `ConfigError` where the checkpoints would not fit."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for left in self.folder.glob(f"*{UNFINISHED}"):
                durable.remove(left)
            probe = self.folder / f"probe{UNFINISHED}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"{self.folder} cannot hold checkpoints: {durable.describe(error)}; give a hydra.run.dir that can be "
                "written to."
            ) from error
        there = sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())
        wanted = int((self.keep + 1) * checkpoint_bytes * SPARE)
        free = shutil.disk_usage(self.folder).free + there
        if free < wanted:
            raise ConfigError(
                f"checkpoint.keep={self.keep} is not accepted: {self.keep + 1} checkpoints of "
                f"{checkpoint_bytes / GIB:.1f} GiB do not fit into the {free / GIB:.1f} GiB that {self.folder} has; "
                "give fewer, or another hydra.run.dir."
            )

    async def save(self, trainer: Savable, state: RunState) -> Path:
        """Begin a checkpoint: returns, with its folder, when everything is captured; the write goes on meanwhile.

        Waits for the one before and raises its error. A step that this object committed already is not saved again.
        """
        began = time.perf_counter()
        await self.wait()
        final = self.folder / f"step_{state.step}"
        if final == self._committed:
            return final
        writing = final.with_name(final.name + UNFINISHED)
        await asyncio.to_thread(self._make_room, writing, await trainer.checkpoint_bytes())
        captured = await trainer.capture()
        self._metrics = {"checkpoint/blocked_s": time.perf_counter() - began, "checkpoint/bytes": float(captured)}
        self._writing = asyncio.create_task(self._finish(trainer, state, writing, final))
        return final

    async def wait(self) -> None:
        """Until the last checkpoint is committed; raises what went wrong with it, once."""
        if self._writing is None:
            return
        task = self._writing
        done, _ = await asyncio.wait({task}, timeout=self.timeout_s)
        self._writing = None
        if not done:
            task.cancel()
            raise CheckpointError(f"a checkpoint in {self.folder} was not written within {self.timeout_s:.0f} s")
        task.result()

    async def settle(self, seconds: float) -> None:
        """The run fails: let the last checkpoint be finished within `seconds`, or give it up."""
        task, self._writing = self._writing, None
        if task is not None:
            await asyncio.wait({task}, timeout=seconds)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def latest(self) -> Path | None:
        return latest(self.folder.parent)

    def read_state(self, path: Path) -> RunState:
        return read_state(path)

    def rewind(self, path: Path) -> None:
        """The run goes on from this checkpoint: `latest` names it, and later ones are deleted."""
        with _sentence(path, "be gone back to"):
            _point(self.folder, path)
            later = [each for each in _steps(self.folder) if _number(each) > _number(path)]
            for each in later:
                durable.delete(each)
        self._committed = path

    # --- inside

    def _make_room(self, writing: Path, wanted: int) -> None:
        with _sentence(writing, "be begun"):
            self.folder.mkdir(parents=True, exist_ok=True)
            durable.remove(writing)
            free = shutil.disk_usage(self.folder).free
            if free < wanted * SPARE:
                raise CheckpointError(
                    f"checkpoint {_named(writing)} cannot be begun: it takes {wanted / GIB:.2f} GiB and {self.folder} "
                    f"has {free / GIB:.2f} GiB left"
                )
            writing.mkdir()

    async def _finish(self, trainer: Savable, state: RunState, writing: Path, final: Path) -> None:
        began = time.perf_counter()
        try:
            await trainer.write(writing)
            await asyncio.to_thread(self._commit, state, writing, final)
        except BaseException:
            with contextlib.suppress(OSError):  # what went wrong first is what is said
                durable.remove(writing)
            raise
        self._metrics["checkpoint/write_s"] = time.perf_counter() - began
        self._committed = final

    def _commit(self, state: RunState, writing: Path, final: Path) -> None:
        with _sentence(writing, "be written"):
            files = {file.name: file.stat().st_size for file in writing.iterdir()}
            body = {"format": FORMAT, **asdict(state), "files": files}
            durable.write(writing / STATE, json.dumps(body, indent=1) + "\n")
            durable.sync(writing)
            if final.exists():  # of a lineage that was left
                durable.delete(final)
            writing.rename(final)
            durable.sync(self.folder)
            _point(self.folder, final)
            for old in _steps(self.folder)[: -self.keep]:
                if old != final:
                    durable.delete(old)


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint of the run in `folder`; None where there is none."""
    pointer = folder / FOLDER / LATEST
    if not pointer.is_file():
        return None
    path = pointer.with_name(pointer.read_text().strip())
    if not path.is_dir():
        raise CheckpointError(f"checkpoint {path}, which {pointer} names, is gone; give resume=<path> of another one")
    return path


def find(path: Path) -> Path | None:
    """A checkpoint by its own folder or by its run's, whose latest it is then."""
    return path if (path / STATE).is_file() else latest(path)


def read_state(path: Path) -> RunState:
    """The driver's side of a checkpoint, after its files were found to be all there; raises `CheckpointError`."""
    try:
        body = json.loads((path / STATE).read_text())
        files, form = dict(body.pop("files")), body.pop("format")
        state = RunState(**body)
    except OSError as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {durable.describe(error)}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {STATE} is damaged ({error})") from error
    if form != FORMAT:
        raise CheckpointError(
            f"checkpoint {path} has format {form}, which this version does not read (it reads {FORMAT})"
        )
    for name, size in files.items():
        file = path / name
        there = file.stat().st_size if file.is_file() else None
        if there != size:
            told = "is missing" if there is None else f"has {there} bytes and not {size}"
            raise CheckpointError(f"checkpoint {path} is not whole: {name} {told}")
    return state


def require_model(state: RunState, model: Mapping[str, Any], path: Path) -> None:
    """Raise `CheckpointError` where a checkpoint is not of this model (an `identity`); its place does not matter."""
    ours, theirs = ({key: each[key] for key in each if key != "source"} for each in (model, state.model))
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key):
            raise CheckpointError(
                f"checkpoint {path} is of another model: its {key} is {theirs.get(key)}, this model's {ours.get(key)}"
            )


def _steps(folder: Path) -> list[Path]:
    """The whole checkpoints, oldest first."""
    return sorted((path for path in folder.glob("step_*") if path.name[5:].isdecimal()), key=_number)


def _number(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _point(folder: Path, path: Path) -> None:
    """Make `latest` name this checkpoint, in one moment."""
    following = folder / f"{LATEST}{UNFINISHED}"
    durable.write(following, path.name + "\n")
    following.replace(folder / LATEST)
    durable.sync(folder)


def _named(writing: Path) -> Path:
    return writing.with_name(writing.name.removesuffix(UNFINISHED))


@contextlib.contextmanager
def _sentence(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"checkpoint {_named(path)} cannot {what}: {durable.describe(error)}") from error
