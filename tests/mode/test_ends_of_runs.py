"""However a run ends, its last finished step is saved; what was due after that step is done by the resumed run."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.checkpoint.folder import best, latest
from app.checkpoint.run_state import RunState, read_state
from app.config.checkpoint import CheckpointConfig
from app.config.placement import PlacementKind
from app.errors import EngineError, RunError
from app.mode.train import CONTROLLERS, TrainingRun
from app.placement import controller as placement_controller
from app.placement import watchdog
from app.placement.controller import CURSOR
from app.types import MemoryUse, StepReport
from tests.simulation import BOTH, SimEngine, SimTrainer, World, config, run_virtual, without_threads

PHASES = {  # of which `time/step` is the sum
    PlacementKind.colocate: ("generate", "train", "sync"),
    PlacementKind.fully_async: ("wait", "train", "sync"),
}
Prepare = Callable[[World, pytest.MonkeyPatch], None]


@dataclass
class Ranks(SimTrainer):
    """Makes one call at a time, as the ranks do: what is called during an update waits for its end."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def finish_step(self) -> StepReport:
        async with self.lock:
            return await super().finish_step()

    async def abort_step(self) -> None:
        async with self.lock:
            await super().abort_step()


def a_world(kind: PlacementKind, folder: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    without_threads(monkeypatch)
    settings = config(kind, steps=6, max_staleness=0)
    settings.checkpoint = CheckpointConfig(every=0, keep=2, export=False)
    settings.eval.every = 3
    return World(settings, folder, trainer=Ranks(seconds=0.1, finish=0.2))


def training_run(world: World, context: Any) -> TrainingRun:
    """The run of a world, with the workers of the context."""
    inputs = SimpleNamespace(
        prompts=SimpleNamespace(train=world.cursor, evals=context.evals),
        restore=lambda saved: world.cursor.restore(saved[CURSOR]),
        chat_template=None,
        demonstrator=None,
        demonstrations=None,
    )
    workers: Any = SimpleNamespace(
        inputs=inputs,
        pool=context.pool,
        supervisor=context.supervisor,
        rollouter=context.rollouter,
        monitor=context.supervisor.monitor,
    )
    run = TrainingRun(world.config, world.folder, world.recorder, workers)  # type: ignore[arg-type]
    run.checkpoints = context.checkpoints
    return run


def play(world: World, *, resumed: RunState | None = None, interrupt_at: float | None = None) -> None:
    """The run in virtual time, from a checkpoint if given, until its end or an interrupt."""

    async def story() -> None:
        context = world.context()
        checkpoint = latest(world.folder)
        version = 0
        if resumed is not None and checkpoint is not None:
            context.checkpoints.rewind(checkpoint)
            version = resumed.version
        run = training_run(world, context)
        due = resumed is not None and resumed.owes_evaluation(world.config.steps)
        controller = CONTROLLERS[world.config.placement.kind](context, version, evaluation_due=due)
        task = asyncio.create_task(run.run(controller))
        if interrupt_at is not None:
            asyncio.get_running_loop().call_later(interrupt_at, task.cancel)
        await task

    run_virtual(story())


def saved(folder: Path) -> int | None:
    checkpoint = latest(folder)
    return None if checkpoint is None else read_state(checkpoint).step


# --- failures


def requests_of_step_5(world: World, seconds: Callable[[], float]) -> None:
    """They take these seconds, or do what the function does instead; those before take one."""
    world.seconds = lambda _: seconds() if len(world.recorder.lines) == 4 else 1.0


def fail(error: Exception) -> float:
    raise error


def too_many_rewards_fail(world: World, _: pytest.MonkeyPatch) -> None:
    def check() -> None:
        if len(world.recorder.lines) == 4:
            raise RunError("too many rewards failed")

    world.scorer.check = check  # type: ignore[method-assign]


def a_prompt_is_refused(world: World, _: pytest.MonkeyPatch) -> None:
    requests_of_step_5(world, lambda: fail(EngineError("engine 0 aborted a prompt")))


def the_driver_has_a_bug(world: World, _: pytest.MonkeyPatch) -> None:
    requests_of_step_5(world, lambda: fail(ZeroDivisionError("a bug")))


def nothing_advances(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "limit_seconds", lambda _: 500.0)
    requests_of_step_5(world, lambda: float("inf"))


def an_engine_cannot_be_restarted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(engine: SimEngine, timeout_s: float) -> None:
        raise EngineError("no memory is left")

    def die() -> float:
        for engine in world.engines:
            engine.die()
        return 1.0

    monkeypatch.setattr(SimEngine, "start", start)
    requests_of_step_5(world, die)


def memory_is_full(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def memory(engine: SimEngine) -> MemoryUse:
        return MemoryUse(2**40, 0.98 if engine.version >= 4 else 0.5)

    monkeypatch.setattr(SimEngine, "memory", memory)


FAILURES: dict[Prepare, str] = {  # and words of the error
    too_many_rewards_fail: "too many rewards failed",
    a_prompt_is_refused: "aborted a prompt",
    the_driver_has_a_bug: "a bug",
    nothing_advances: "no progress for 500 s",
    an_engine_cannot_be_restarted: "no memory is left",
    memory_is_full: r"has used 98\.0%",
}


@BOTH
@pytest.mark.parametrize("prepare", FAILURES, ids=lambda prepare: prepare.__name__)
def test_a_failure_outside_the_trainer_saves_the_last_finished_step(
    prepare: Prepare, kind: PlacementKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = a_world(kind, tmp_path, monkeypatch)
    prepare(world, monkeypatch)
    with pytest.raises((RunError, ZeroDivisionError), match=FAILURES[prepare]):
        play(world)
    assert [line["step"] for line in world.recorder.lines] == [1, 2, 3, 4]
    assert saved(tmp_path) == 4


@BOTH
def test_a_failed_sync_saves_the_step_that_was_trained(
    kind: PlacementKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its update is done: the parameters are those of step 4, and no longer those of step 3."""
    world = a_world(kind, tmp_path, monkeypatch)
    make = world.context

    def context() -> Any:
        made = make()
        world.sync.fail_at = 4
        return made

    monkeypatch.setattr(world, "context", context)
    with pytest.raises(RunError, match="push failed on purpose"):
        play(world)
    assert [line["step"] for line in world.recorder.lines] == [1, 2, 3, 4]
    assert saved(tmp_path) == 4
    trained = [ids for _, ids, _ in world.recorder.ledger]
    assert trained == [[group.prompt.id for group in groups] for _, groups in world.trainer.trained]


@BOTH
def test_a_failed_evaluation_saves_its_step_which_is_evaluated_by_the_resumed_run(
    kind: PlacementKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = a_world(kind, tmp_path, monkeypatch)

    async def evaluated(*_: object) -> object:
        raise RunError("every episode of evaluation set eval failed")

    monkeypatch.setattr(placement_controller, "evaluate", evaluated)
    with pytest.raises(RunError, match="every episode"):
        play(world)
    state = read_state(tmp_path / "checkpoints" / "step_3")
    assert (saved(tmp_path), state.accuracy, state.evaluation_due) == (3, None, True)
    assert len(world.trainer.trained) == 3


@BOTH
def test_a_run_that_now_ends_with_its_checkpoint_evaluates_it(
    kind: PlacementKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = a_world(kind, tmp_path, monkeypatch)
    too_many_rewards_fail(world, monkeypatch)
    with pytest.raises(RunError, match="too many"):
        play(world)
    assert [step for _, step in world.recorder.evaluations][-1] == 3
    world.config.steps = 4
    world.trainer.open = None  # as in a new process
    world.trainer.offloaded.clear()
    play(world, resumed=read_state(tmp_path / "checkpoints" / "step_4"))
    assert [step for _, step in world.recorder.evaluations][-1] == 4
    assert len(world.trainer.trained) == 4


# --- interrupts


@BOTH
def test_an_interrupt_at_any_moment_saves_all_that_was_trained(
    kind: PlacementKind, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Generation, training, the update, the sync, the evaluation: what the ranks trained is recorded and saved."""
    updates, due = [], set()
    for tenth in range(5, 75, 4):
        folder = tmp_path_factory.mktemp("run")
        world = a_world(kind, folder, monkeypatch)
        world.push_seconds = 0.5
        with pytest.raises(asyncio.CancelledError):
            play(world, interrupt_at=tenth / 10)
        done = len(world.trainer.trained)
        updates.append(done)
        assert world.recorder.warnings == []
        assert saved(folder) == (done or None), tenth
        if (checkpoint := latest(folder)) is not None:
            evaluated = {step for _, step in world.recorder.evaluations}
            due.add(read_state(checkpoint).evaluation_due)
            assert read_state(checkpoint).evaluation_due == (done % 3 == 0 and done not in evaluated), tenth
        assert [line["step"] for line in world.recorder.lines] == list(range(1, done + 1)), tenth
        trained = [ids for _, ids, _ in world.recorder.ledger]
        assert trained == [[group.prompt.id for group in groups] for _, groups in world.trainer.trained]
        for line in world.recorder.lines:  # the last one may be of a step that was not synced
            assert line["time/step"] == pytest.approx(sum(line.get(f"time/{phase}", 0.0) for phase in PHASES[kind]))
            assert "time/finish" not in line
    assert min(updates) == 0
    assert max(updates) >= 3
    assert due == {True, False}


@BOTH
@pytest.mark.parametrize(("at", "steps"), [(3, 6), (6, 6), (6, 9)])
def test_an_interrupted_evaluation_is_done_before_anything_else(
    at: int, steps: int, kind: PlacementKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle, after the last step, and after what was the last step, with more steps to come."""
    world = a_world(kind, tmp_path, monkeypatch)
    order: list[tuple[str, int]] = []

    async def evaluated(*arguments: Any) -> Any:
        version = arguments[-1]
        order.append(("evaluation", version))
        if version == at and order.count(order[-1]) == 1:
            raise asyncio.CancelledError
        return {"eval": {"accuracy": version / 10}}, []

    monkeypatch.setattr(placement_controller, "evaluate", evaluated)
    with pytest.raises(asyncio.CancelledError):
        play(world)
    state = read_state(tmp_path / "checkpoints" / f"step_{at}")
    assert (saved(tmp_path), state.accuracy, state.evaluation_due) == (at, None, True)

    order.clear()
    order.append(("evaluation", at))  # once already
    world.config.steps = steps
    world.recorder.evaluations.clear()
    begin = Ranks.begin_step

    async def begin_step(trainer: Ranks, *, version: int) -> None:
        order.append(("step", version))
        await begin(trainer, version=version)

    monkeypatch.setattr(Ranks, "begin_step", begin_step)
    world.trainer.open = None  # as in a new process
    world.trainer.offloaded.clear()
    play(world, resumed=state)
    assert order[1] == ("evaluation", at)
    assert [step for what, step in order if what == "step"][: steps - at] == list(range(at + 1, steps + 1))
    assert [step for _, step in world.recorder.evaluations] == list(range(at, steps + 1, 3))

    state = read_state(tmp_path / "checkpoints" / f"step_{at}")
    assert (state.accuracy, state.evaluation_due) == (at / 10, False)
    assert best(tmp_path) == tmp_path / "checkpoints" / f"step_{steps}"
