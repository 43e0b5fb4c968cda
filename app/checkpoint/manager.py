"""The checkpoints of a run, from the driver: which are complete, which are the latest and the best, which get deleted.

    checkpoints/step_N.tmp/     being written: the ranks' files, then state.json
    checkpoints/step_N/         complete
    checkpoints/latest          text file with the name of the newest complete one
    checkpoints/best            text file with the name of the one with the highest accuracy, if `keep_best`
    checkpoints/aside/step_N/   later than a checkpoint that the run was rewound to; never read, never deleted

A checkpoint is committed in this order:

    1. The ranks write their files, flush them to disk and return their checksums.
    2. state.json lists all files with sizes and checksums; it and the folder are flushed.
    3. step_N.tmp is renamed to step_N, and the rename is flushed.
    4. `latest` is replaced atomically, and the replacement is flushed; then `best`, if this one is better.
    5. Checkpoints beyond the newest `keep` are deleted, except the best, each renamed to *.tmp first.

Invariants:
- Only names without .tmp are complete. The one that `latest` names survives a crash of the machine.
- `best` follows from the accuracies in the checkpoints' state.json, so a resumed run knows the best so far.
- A failure at any moment, `kill -9` included, leaves the previous checkpoint untouched.
- Steps 2 to 5 run in one thread, which a cancellation does not stop and which nothing else races with.

With several nodes, all of them must see the folder.
"""

import asyncio
import contextlib
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from app.checkpoint.folder import ASIDE, BEST, FOLDER, LATEST, ResumePoint, complete, intact, newest_intact, step_of
from app.checkpoint.run_state import RunState, read_state, set_accuracy, write_state
from app.config.checkpoint import CheckpointConfig
from app.errors import CheckpointError, ConfigError
from app.protocols import Trainer
from app.utils import files
from app.utils.tasks import in_thread, run_to_end
from app.utils.units import size

OVERHEAD = 1.02  # bytes on disk over bytes of tensors: names, headers
COMMIT_TIMEOUT_S = 30.0  # for the end of a commit that was under way when its time was over


class CheckpointManager:
    """Writes and deletes the checkpoints of one run, one at a time.

    Example::

        checkpoints = CheckpointManager(run_folder, keep=2)
        checkpoints.prepare(await trainer.checkpoint_bytes())
        await checkpoints.save(trainer, RunState(step=10, version=10))   # returns once the state is captured
        ...                                                              # training continues
        await checkpoints.wait()                                         # step_10 is committed

    While a checkpoint is being written, one more than `keep`, or two with `keep_best`, exist.
    """

    def __init__(self, folder: Path, keep: int, *, keep_best: bool = False, timeout_s: float = 1800.0):
        self.folder = folder / FOLDER
        self.keep = keep
        self.keep_best = keep_best
        self.timeout_s = timeout_s  # deadline of a write
        self._best: tuple[Path, float] | None = None  # the best checkpoint and its accuracy
        self._writing: asyncio.Task[None] | None = None
        self._target: Path | None = None  # of the newest write
        self._committed: Path | None = None
        self.metrics: dict[str, float] = {}  # of the newest checkpoint; the seconds of its write once it is committed

    def prepare(self, checkpoint_bytes: int, resume_point: ResumePoint | None = None) -> None:
        """Remove unfinished checkpoints. Raises `ConfigError` unless the folder is writable and has enough space.

        Checkpoints after the resume point will be set aside and make no room for new ones.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for unfinished in self.folder.glob(f"*{files.UNFINISHED}"):
                files.remove(unfinished)
            probe = self.folder / f"probe{files.UNFINISHED}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            why = f"{self.folder} cannot hold checkpoints: {files.describe(error)}"
            raise ConfigError("hydra.run.dir", self.folder.parent, "a writable folder", why) from error

        # Checkpoints that `keep` deletes make room; those set aside, now or at the rewind, do not.
        last = step_of(resume_point.path) if resume_point else -1
        kept = (checkpoint for checkpoint in complete(self.folder) if step_of(checkpoint) <= last)
        available = shutil.disk_usage(self.folder).free + files.bytes_in(kept)
        count = self.keep + int(self.keep_best) + 1
        if available < int(count * checkpoint_bytes * OVERHEAD):
            advice = "a smaller number, checkpoint.keep_best=false" if self.keep_best else "a smaller number"
            advice += f", another hydra.run.dir, or delete {self.folder / ASIDE} if it exists"
            sizes = f"{count} checkpoints of {size(checkpoint_bytes)} do not fit into the {size(available)} available"
            raise ConfigError("checkpoint.keep", self.keep, advice, f"{sizes} in {self.folder}")

    async def save(self, trainer: Trainer, state: RunState) -> Path:
        """Capture a checkpoint and start writing it in the background; return its folder, which a commit creates.

        Waits for the previous write first. A step that this object committed is not saved again.

        Raises:
            CheckpointError: The previous write failed, there is not enough space, or the folder was not created within
                the deadline.
        """
        started = time.perf_counter()
        await self.wait()

        final = self.folder / f"step_{state.step}"
        if final == self._committed:
            return final

        writing = final.with_name(final.name + files.UNFINISHED)
        creating = in_thread(self._create_folder, writing, final, await trainer.checkpoint_bytes())
        try:
            await asyncio.wait_for(creating, self.timeout_s)
        except TimeoutError:
            late = f"its folder was not created within {self.timeout_s:.0f} s"
            raise CheckpointError(f"checkpoint {final} cannot be started: {late}") from None

        captured = await trainer.capture()
        self.metrics = {"checkpoint/blocked_s": time.perf_counter() - started, "checkpoint/bytes": float(captured)}
        self._target = final
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
            raise CheckpointError(f"checkpoint {self._target} was not written within {self.timeout_s:.0f} s")
        task.result()

    async def settle(self, seconds: float) -> str | None:
        """Before the run ends or restarts: give the last checkpoint this many seconds to finish, then cancel it.

        A commit that has begun is finished, within `COMMIT_TIMEOUT_S`. A cancellation cancels the checkpoint at once.
        Returns why the checkpoint was not written; None if it was, or if none was being written.
        """
        task, self._writing = self._writing, None
        if task is None:
            return None
        try:
            await asyncio.wait({task}, timeout=seconds)
        finally:
            task.cancel()
            await asyncio.wait({task}, timeout=COMMIT_TIMEOUT_S)

        if self._committed == self._target:
            return None
        if not task.done():
            return f"checkpoint {self._target} was not committed within {COMMIT_TIMEOUT_S:.0f} s"
        if task.cancelled():
            return f"checkpoint {self._target} was not written within {seconds:g} s"
        return str(task.exception())

    @property
    def committed_step(self) -> int | None:
        """The step of the checkpoint that this object committed or rewound to last."""
        return None if self._committed is None else step_of(self._committed)

    def due(self, step: int, accuracy: float | None, config: CheckpointConfig) -> bool:
        """Whether to save a step, be it the last or not: every `checkpoint.every` steps, and the best."""
        return (config.every > 0 and step % config.every == 0) or self.is_best(accuracy)

    def is_best(self, accuracy: float | None) -> bool:
        """Whether a checkpoint with this accuracy would be kept as the best: never without `keep_best`."""
        return self.keep_best and accuracy is not None and (self._best is None or accuracy > self._best[1])

    def set_accuracy(self, accuracy: float) -> None:
        """Write the accuracy of the checkpoint that the run was rewound to, and make it the best if it is."""
        assert self._committed is not None
        with _wrap_errors(self._committed, "be updated"):
            set_accuracy(self._committed, accuracy)
            if self.is_best(accuracy):
                self._set_best((self._committed, accuracy))

    async def resume_point(self, named: Path | None = None) -> ResumePoint | None:
        """Return the checkpoint to resume from, after reading all its files; None if the run has none.

        It is the one that is named, else the newest intact one. Raises `DamagedCheckpoint` if that, or every one, is
        damaged, and `CheckpointError` for an unknown format or a late read.
        """
        reading = in_thread(intact, named) if named else in_thread(newest_intact, self.folder.parent)
        try:
            return await asyncio.wait_for(reading, self.timeout_s)
        except TimeoutError:
            late = f"was not read within {self.timeout_s:.0f} s to compare its checksums"
            raise CheckpointError(f"{named or self.folder} {late}") from None

    def rewind(self, path: Path) -> list[Path]:
        """Make this checkpoint the latest, and set the later ones aside; return where those are now.

        The best is the best of those that stay.
        """
        with _wrap_errors(path, "be rewound to"):
            kept = [checkpoint for checkpoint in complete(self.folder) if step_of(checkpoint) <= step_of(path)]
            scored = [(each, accuracy) for each in kept if (accuracy := _accuracy(each)) is not None]
            best = max(scored, key=lambda each: each[1], default=None)  # of equal ones, the first
            self._set_best(best if self.keep_best else None)
            self._point(LATEST, path)
            later = [checkpoint for checkpoint in complete(self.folder) if step_of(checkpoint) > step_of(path)]
            aside = [files.set_aside(checkpoint, self.folder / ASIDE) for checkpoint in later]
        self._committed = self.folder / path.name
        return aside

    def start_over(self) -> list[Path]:
        """Set every checkpoint aside; return where they are now.

        `latest` names none, but a commit may have been killed just before it did.
        """
        with _wrap_errors(self.folder, "be set aside"):
            self._set_best(None)
            return [files.set_aside(checkpoint, self.folder / ASIDE) for checkpoint in complete(self.folder)]

    # --- the background write

    def _create_folder(self, writing: Path, final: Path, checkpoint_bytes: int) -> None:
        with _wrap_errors(final, "be started"):
            self.folder.mkdir(parents=True, exist_ok=True)
            files.remove(writing)
            needed = checkpoint_bytes * OVERHEAD
            free = shutil.disk_usage(self.folder).free
            if free < needed:
                needs = f"it needs {size(needed)}, and {self.folder} has {size(free)} left"
                raise CheckpointError(f"checkpoint {final} cannot be started: {needs}")
            writing.mkdir()

    async def _write(self, trainer: Trainer, state: RunState, writing: Path, final: Path) -> None:
        started = time.perf_counter()
        try:
            checksums = await trainer.write(writing)
        except BaseException:
            await run_to_end(_discard, writing)
            raise
        await run_to_end(self._commit, state, checksums, writing, final)
        self.metrics["checkpoint/write_s"] = time.perf_counter() - started

    def _commit(self, state: RunState, checksums: Mapping[str, int], writing: Path, final: Path) -> None:
        try:
            with _wrap_errors(final, "be written"):
                write_state(writing, state, checksums)
                files.sync(writing)

                # A checkpoint of this step that `latest` never named, or that the run went back before.
                if final.exists():
                    files.set_aside(final, self.folder / ASIDE)
                writing.rename(final)
                files.sync(self.folder)
                self._point(LATEST, final)
                if state.accuracy is not None and self.is_best(state.accuracy):
                    self._set_best((final, state.accuracy))
        except BaseException:
            _discard(writing)
            raise

        self._committed = final
        with _wrap_errors(final, "replace an older one"):
            kept = {final, self._best[0] if self._best else final}
            for old in complete(self.folder)[: -self.keep]:
                if old not in kept:
                    files.delete(old)

    def _point(self, pointer: str, path: Path) -> None:
        """Make `latest` or `best` name this checkpoint, atomically."""
        files.replace_file(self.folder / pointer, path.name + "\n", durable=True)

    def _set_best(self, best: tuple[Path, float] | None) -> None:
        if best is not None:
            self._point(BEST, best[0])
        elif (self.folder / BEST).exists():
            (self.folder / BEST).unlink()
            files.sync(self.folder)
        self._best = best


def _accuracy(checkpoint: Path) -> float | None:
    """Return the accuracy of a checkpoint's step; None if it was not evaluated, or the checkpoint is damaged."""
    try:
        return read_state(checkpoint).accuracy
    except CheckpointError:
        return None


def _discard(writing: Path) -> None:
    """Remove an unfinished checkpoint. An error here must not hide the one that came first."""
    with contextlib.suppress(OSError):
        files.remove(writing)


@contextlib.contextmanager
def _wrap_errors(path: Path, action: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"checkpoint {path} cannot {action}: {files.describe(error)}") from error
