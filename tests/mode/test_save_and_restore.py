"""The last step is saved whatever ends the run, and a run is resumed without losing a checkpoint."""

import asyncio
import os
import re
import signal
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.checkpoint.folder import latest, newest_intact
from app.config.checkpoint import CheckpointConfig
from app.config.model import LoraConfig
from app.config.placement import PlacementKind
from app.data.cursor import PromptCursor
from app.errors import Interrupted, TrainerError
from app.mode.train import TrainingRun, second_signal
from app.model.hf_directory import identity
from app.placement.colocate import Colocate
from app.placement.controller import CURSOR
from app.tracking.recorder import RunFolderRecorder
from app.utils.tasks import until_signal
from tests.checkpoint.plain_files import DATA, PlainFiles, flip_a_byte, names, save
from tests.folders import warnings
from tests.mode.test_ends_of_runs import training_run
from tests.model.support import save_qwen3
from tests.simulation import SimTrainer, World, config, prompts

DEADLINE_S = 60.0


# --- signals


@dataclass
class Interrupting(SimTrainer):
    """Sends SIGTERM to this process: in step `at`, and `more` times while a checkpoint is written."""

    at: int = 4
    more: int = 0
    answered: asyncio.Event = field(default_factory=asyncio.Event)

    async def begin_step(self, *, version: int) -> None:
        await super().begin_step(version=version)
        if version == self.at:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(DEADLINE_S)  # until it is cancelled

    async def write(self, folder: Path) -> dict[str, int]:
        for number in range(self.more):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(self.answered.wait() if number == 0 else asyncio.sleep(DEADLINE_S), DEADLINE_S)
        return await PlainFiles().write(folder)


def interrupted(folder: Path, trainer: Interrupting, *, steps: int = 1000) -> World:
    """Run the simulated world until it is interrupted."""
    settings = config(PlacementKind.colocate, steps=steps)
    settings.checkpoint = CheckpointConfig(grace_s=DEADLINE_S)
    world = World(settings, folder, lambda prompt_id: 0.001, push_seconds=0.0, trainer=trainer)

    async def main() -> None:
        context = world.context()

        def answer() -> None:
            world.recorder.warn(second_signal(settings))
            trainer.answered.set()

        await until_signal(training_run(world, context).run(Colocate(context)), on_second=answer)

    with pytest.raises(Interrupted, match="interrupted by SIGTERM"):
        asyncio.run(main())
    return world


def saved_step(folder: Path) -> int | None:
    point = newest_intact(folder)
    return None if point is None else point.state.step


SECOND = (
    "the run is saving the last step, for at most checkpoint.grace_s=60 s after its microbatch, and shutting down; a "
    "third signal ends that at once"
)


@pytest.mark.parametrize(("at", "more", "step"), [(4, 0, 3), (4, 1, 3), (1, 0, None)])
def test_a_signal_saves_the_last_step_and_a_second_one_is_answered(
    at: int, more: int, step: int | None, tmp_path: Path
) -> None:
    world = interrupted(tmp_path, Interrupting(at=at, more=more))
    assert world.recorder.statuses == ([] if step is None else [f"saving step {step}"])
    assert (saved_step(tmp_path), len(world.recorder.lines), world.recorder.warnings) == (step, at - 1, [SECOND] * more)


def test_a_signal_during_the_write_after_the_last_step_does_not_end_it(tmp_path: Path) -> None:
    class LastWrite(Interrupting):
        async def write(self, folder: Path) -> dict[str, int]:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.1)
            return await PlainFiles().write(folder)

    world = interrupted(tmp_path, LastWrite(at=1000), steps=3)
    assert (saved_step(tmp_path), len(world.recorder.lines), world.recorder.warnings) == (3, 3, [])


async def test_records_are_on_disk_before_the_checkpoint_of_their_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []
    fsync = os.fsync

    def recorded(handle: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        fsync(handle)

    settings = config(PlacementKind.colocate)
    world = World(settings, tmp_path)
    with RunFolderRecorder(settings, tmp_path) as recorder:
        world.recorder = recorder  # type: ignore[assignment]
        recorder.log(1, {"reward/mean": 0.5})
        recorder.log_prompts(1, trained=["a/1@0"], filtered=[])
        context = world.context()
        monkeypatch.setattr(os, "fsync", recorded)
        await Colocate(context, 1).save()
        await context.checkpoints.wait()
    order = [flushed.index(name) for name in ("metrics.jsonl", "prompts.jsonl", tmp_path.name, "state.json")]
    assert order == sorted(order)


# --- resume


@dataclass
class Restored(SimTrainer):
    """Notes what it was restored from."""

    restorations: list[str] = field(default_factory=list)
    fails: int = 0  # restorations that end with an error

    async def restore(self, folder: Path, *, version: int) -> None:
        self.restorations.append(f"{folder.name} as {version}")
        if len(self.restorations) <= self.fails:
            raise TrainerError("rank 1 failed")


class Resumed:
    """A run with checkpoints of steps 20, 40 and 60 that is being resumed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.source = save_qwen3(folder / "source")
        self.checkpoints = folder / "checkpoints"
        self.trainer = Restored()
        saved = PromptCursor(prompts(10), seed=0, shuffle=True)
        saved.take(3)
        save(folder, [20, 40, 60], extra={CURSOR: saved.state()}, model=identity(self.source, LoraConfig()))

    def resume(self, resume: str, *, restarts: int = 0) -> int:
        """Return the policy version that the run continues with."""
        settings = config(steps=100)
        settings.resume = resume
        self.cursor = PromptCursor(prompts(10), seed=0, shuffle=True)
        inputs = SimpleNamespace(
            prompts=SimpleNamespace(train=self.cursor),
            restore=lambda saved: self.cursor.restore(saved[CURSOR]),
            model_path=self.source,
            chat_template=None,
        )
        workers: Any = SimpleNamespace(inputs=inputs)
        with RunFolderRecorder(settings, self.folder) as recorder:
            run = TrainingRun(settings, self.folder, recorder, workers)
            run.restarts = restarts
            return asyncio.run(self._restore(run))

    async def _restore(self, run: TrainingRun) -> int:
        for _ in range(self.trainer.fails):
            with pytest.raises(TrainerError):
                await run.restore_or_initialize(self.trainer, await run.find_resume_point())
            run.restarts += 1
        return await run.restore_or_initialize(self.trainer, await run.find_resume_point())


def test_a_run_that_goes_back_keeps_its_later_checkpoints_and_names_them(tmp_path: Path) -> None:
    run = Resumed(tmp_path)
    assert run.resume(str(run.checkpoints / "step_20")) == 20
    assert run.trainer.restorations == ["step_20 as 20"]
    assert len(run.cursor.state()["returned"]) == 3
    assert names(tmp_path) == {"latest", "step_20", "aside"}
    aside = run.checkpoints / "aside"
    (warning,) = warnings(tmp_path)
    assert "step 20" in warning
    assert f"{aside / 'step_40'}, {aside / 'step_60'}" in warning
    assert latest(tmp_path) == run.checkpoints / "step_20"


def test_checkpoints_that_latest_never_named_are_set_aside_by_a_run_that_starts_over(tmp_path: Path) -> None:
    run = Resumed(tmp_path)
    (run.checkpoints / "latest").unlink()  # killed between a rename and `latest`
    assert run.resume("auto") == 0
    assert run.trainer.restorations == []
    aside = run.checkpoints / "aside"
    assert names(tmp_path) == {"aside"}
    assert {each.name for each in aside.iterdir()} == {"step_20", "step_40", "step_60"}
    moved = ", ".join(str(aside / f"step_{step}") for step in (20, 40, 60))
    (warning,) = warnings(tmp_path)
    assert moved in warning


def test_a_trainer_that_fails_before_the_run_went_back_still_resumes_what_was_named(tmp_path: Path) -> None:
    run = Resumed(tmp_path)
    run.trainer.fails = 1
    assert run.resume(str(run.checkpoints / "step_20")) == 20
    assert run.trainer.restorations == ["step_20 as 20", "step_20 as 20"]


@pytest.mark.parametrize(("resume", "restarts"), [("auto", 0), ("never", 1)])
def test_a_damaged_newest_checkpoint_is_stepped_over_with_a_warning(resume: str, restarts: int, tmp_path: Path) -> None:
    """By `resume=auto`, and by every restart of the trainer."""
    run = Resumed(tmp_path)
    damaged = run.checkpoints / "step_60"
    flip_a_byte(damaged / DATA)
    assert run.resume(resume, restarts=restarts) == 40
    assert run.trainer.restorations == ["step_40 as 40"]
    assert names(tmp_path) == {"latest", "step_20", "step_40", "aside"}
    first, second = warnings(tmp_path)
    assert re.search(f"step_40 .*{damaged} is damaged: {DATA}", first)
    assert second.endswith(str(run.checkpoints / "aside" / "step_60"))
