"""Trainer and engines take turns on the same devices: what one side needs is there when it is its turn, and only then.

The trainer is the real split step with an offload that leaves NaN in place of what it takes away; the engines are
simulated and refuse what a server without its memory could not do.
"""

import os
import signal
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from app.config import RunConfig
from app.config.placement import PlacementKind
from app.config.trainer import Optimizer as Kind
from app.offload.trainer import Offload
from app.placement.colocate import Colocate
from app.types import Completion, EngineMemory, GroupRequest, InFlight, ScoredGroup, SyncReport, TrainerMemory
from tests.offload.support import FakeRank, Poisoned
from tests.placement.test_same_parameters import GRPO, InProcess, Recorded
from tests.recovery.test_recovery_runs import assert_ledger
from tests.runs import Run
from tests.simulation import SimSync, World, config, run_virtual

STEPS = 3


@dataclass
class Card:
    """One device: what is on it, by whom; remembers everything that came and went."""

    here: set[object] = field(default_factory=lambda: {*TrainerMemory, *EngineMemory})
    moves: list[str] = field(default_factory=list)
    resident: frozenset[EngineMemory] = frozenset()  # what stays, and is small enough to

    def leave(self, part: EngineMemory | TrainerMemory) -> None:
        assert part in self.here, f"{part} left twice"
        self.here.remove(part)
        self.moves.append(f"-{part.name}")

    def come(self, part: EngineMemory | TrainerMemory) -> None:
        if part not in self.here:
            self.here.add(part)
            self.moves.append(f"+{part.name}")
        if EngineMemory.kv_cache in self.here:
            assert TrainerMemory.parameters not in self.here, "too much for the card"
        if EngineMemory.weights in self.here - self.resident:
            assert TrainerMemory.optimizer not in self.here, "too much for the card"


class Shared(InProcess):
    """The trainer's side of the card."""

    memory_offload: Offload

    def __init__(self, path: Path, made: RunConfig, optimizer: Kind) -> None:
        super().__init__(path, made, optimizer)
        self.card = Card(resident=frozenset({EngineMemory.weights} if made.model.lora.enabled else ()))

    async def offload(self, part: TrainerMemory) -> None:
        self.memory_offload.offload(part)
        self.card.leave(part)

    async def onload(self, part: TrainerMemory) -> None:
        self.memory_offload.onload(part)
        self.card.come(part)

    async def add_groups(self, groups: Sequence[ScoredGroup]) -> None:
        assert self.card.here == {*TrainerMemory, *self.card.resident}
        await super().add_groups(groups)


class Resident(Recorded):
    """The engine's side of the card."""

    card: Card
    paused = False

    async def generate(self, request: GroupRequest) -> list[Completion]:
        assert self.card.here == {*EngineMemory}
        assert not self.paused
        return await super().generate(request)

    async def pause(self, in_flight: InFlight) -> None:
        await super().pause(in_flight)
        self.paused = True

    async def resume(self) -> None:
        await super().resume()
        self.paused = False

    async def release(self, parts: Collection[EngineMemory]) -> None:
        assert self.paused
        for part in parts:
            self.card.leave(part)

    async def reload(self, parts: Collection[EngineMemory]) -> None:
        for part in parts:
            self.card.come(part)


class Reads(SimSync):
    """A push reads the parameters and writes the engine's weights."""

    trainer: Shared

    async def sync(self, version: int) -> SyncReport:
        assert EngineMemory.weights in self.trainer.card.here
        assert torch.isfinite(self.trainer.parameters).all()
        return await super().sync(version)


def train(
    folder: Path, model: Path, make_offload: Callable[[Any], Offload], *, lora_rank: int = 0, max_staleness: int = 0
) -> Shared:
    """A whole run on one card, as runs begin: the trainer has it."""
    made = config(PlacementKind.colocate, steps=STEPS, algorithm=GRPO, max_staleness=max_staleness)
    made.model.lora.rank = lora_rank
    trainer = Shared(model, made, Kind.adamw)
    trainer.memory_offload = make_offload(FakeRank(trainer.step))
    world = World(made, folder, engine_count=1, trainer=trainer)  # type: ignore[arg-type]

    async def story() -> None:
        context = world.context()
        engine = Resident(world.seconds, world.right)
        engine.card = trainer.card
        sync = Reads([engine], made.placement.in_flight_or_default())
        sync.trainer = trainer
        context.pool.engines[:] = [engine]
        context.weight_sync.synchronizer = sync
        await context.time_sharing.offload_engines()
        trainer.card.moves.clear()
        await Colocate(context).run()

    run_virtual(story())
    return trainer


@pytest.mark.parametrize(("lora_rank", "max_staleness"), [(0, 0), (4, 0), (0, 2)])
def test_the_devices_change_hands_in_the_designs_order(
    lora_rank: int, max_staleness: int, tmp_path: Path, model: Path
) -> None:
    """Engines that serve adapters keep the weights of the model."""
    reloaded, released = ([], []) if lora_rank else (["+weights"], ["-weights"])
    to_engines = ["-gradients", "-optimizer", *reloaded, "-parameters", "+graphs", "+kv_cache"]
    to_trainer = ["-graphs", "-kv_cache", *released, "+parameters", "+optimizer", "+gradients"]
    trained = train(tmp_path, model, Poisoned, lora_rank=lora_rank, max_staleness=max_staleness)
    assert trained.card.moves == to_engines + STEPS * (to_trainer + to_engines)


def test_nothing_that_is_away_is_read(tmp_path: Path, model: Path) -> None:
    """With NaN in place of what was taken away the run trains the same parameters, to the last bit."""
    still = train(tmp_path / "still", model, partial(Offload, moves=False))
    moved = train(tmp_path / "moved", model, Poisoned)
    assert torch.isnan(moved.parameters).all()  # the run ended in the engines' turn
    for part in TrainerMemory:
        moved.memory_offload.onload(part)
    assert torch.equal(moved.parameters, still.parameters)
    losses = [[report.metrics["loss/policy"] for report in each.reports] for each in (still, moved)]
    assert losses[0] == losses[1]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_whole_run_on_one_memory_survives_the_loss_of_its_trainer(start: Callable[..., Run]) -> None:
    """Real parts: the ranks' memory is freed and comes back in every step, and before a trainer begins anew."""
    overrides = ["checkpoint.every=2", "eval.before_train=false", "data.arithmetic.eval_problems=20"]
    saver = "++rollout.engine_args.enable-memory-saver=false"  # a CPU has none
    run = start("steps=10", *overrides, saver, "checkpoint.export=true", module="tests.shared_memory_app")
    run.wait_for_step(3)
    os.kill(run.pid_of("TrainerRank"), signal.SIGKILL)
    assert run.wait(300) == 0, run.text
    assert run.gone_within(15), run.processes()
    assert_ledger(run.folder, 10)
    assert max(line["mismatch/kl"] for line in run.metrics()) < 1e-6
    assert "restarted from step" in run.text
    moved = (run.folder / "logs" / "trainer_0.log").read_text()
    assert moved.count("onloaded parameters") >= 10
    assert moved.count("offloaded optimizer") >= 10
    assert list(run.folder.glob("**/model.safetensors"))
