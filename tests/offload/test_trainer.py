"""What is taken off the device comes back bit for bit, and nothing reads it meanwhile."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from app.config.algorithm import Kl
from app.config.trainer import TrainerConfig
from app.errors import SyncError, TrainerError
from app.offload import trainer as module
from app.offload.trainer import HostCopy, Offload
from app.types import ScoredGroup, TrainerMemory
from tests.model.support import save_qwen3, save_qwen35
from tests.offload.support import Host, storages
from tests.trainer.ranks import run_on
from tests.trainer.support import Scenario, full, make_step, parameters, sampled, scored_groups, train
from tests.trainer.test_step import GRPO
from tests.weight_sync.support import make_push, make_trainer, started

pytestmark = pytest.mark.usefixtures("one_thread")
ALL = list(TrainerMemory)
WITH_REFERENCE = replace(GRPO, kl=Kl.k3, kl_coefficient=0.1)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3(tmp_path_factory.mktemp("policy"), tied=True)


@pytest.fixture(scope="module")
def groups(path: Path) -> list[ScoredGroup]:
    return sampled(path, scored_groups(4))


def two_steps(mesh: DeviceMesh | None, path: Path, groups: Sequence[ScoredGroup], *, offload: bool) -> dict[str, Any]:
    """Two steps; with `offload` everything leaves and comes back before, between and after them."""
    torch.manual_seed(0)
    scenario = Scenario(WITH_REFERENCE, groups, trainer=TrainerConfig(lr=1e-3), reference=path)
    step = make_step(path, scenario, mesh)
    host = Host(step, step.reference)
    part = Offload(host, moves=True)  # type: ignore[arg-type]
    metrics, freed = [], []
    for version in (1, 2):
        if offload:
            freed.append(_there_and_back(host, part))
        metrics.append(train(step, scenario, version).metrics)
    if offload:
        freed.append(_there_and_back(host, part))
    assert host.reference is not None
    return {
        "losses": [[line[name] for name in ("loss/total", "grad_norm", "mismatch/kl")] for line in metrics],
        "parameters": parameters(step.model),
        "optimizer": [full(value) for _, _, value in host.optimizer.state()],
        "reference": [full(value) for value in host.reference.parameters()],
        "freed": freed,
    }


def _there_and_back(host: Host, part: Offload) -> int:
    """Bytes of parameters, reference and optimizer that were gone meanwhile; what a forward gathered stays gone."""
    gathered = _held(host)
    for each in ALL:
        part.offload(each)
    assert sum(storage.nbytes() for storage in (*gathered, *_held(host))) == 0
    for each in ALL:
        part.onload(each)
    return sum(storage.nbytes() for storage in set(_held(host)))


def _held(host: Host) -> list[torch.UntypedStorage]:
    assert host.reference is not None
    return [
        *storages(host.model.parameters()),
        *storages(host.reference.parameters()),
        *storages(value for _, _, value in host.optimizer.state()),
    ]


def on_ranks(mesh: DeviceMesh, path: Path, groups: Sequence[ScoredGroup]) -> dict[bool, dict[str, Any]]:
    return {offload: two_steps(mesh, path, groups, offload=offload) for offload in (False, True)}


@pytest.mark.parametrize("ranks", [0, 2])
def test_training_is_the_same_to_the_last_bit(
    ranks: int, path: Path, groups: list[ScoredGroup], tmp_path: Path
) -> None:
    if ranks:
        found = run_on(ranks, on_ranks, tmp_path / "results.pt", path, groups)
    else:
        found = {offload: two_steps(None, path, groups, offload=offload) for offload in (False, True)}
    still, moved = found[False], found[True]
    assert moved["losses"] == still["losses"]
    for name, parameter in still["parameters"].items():
        assert torch.equal(moved["parameters"][name], parameter), name
    for kind in ("optimizer", "reference"):
        assert len(moved[kind]) == len(still[kind]) > 0
        assert all(torch.equal(one, other) for one, other in zip(moved[kind], still[kind], strict=True))
    first, second, third = moved["freed"]  # the optimizer has its state after the first update
    assert 0 < 1.9 * first < second == third


def test_pieces_smaller_than_a_tensor_keep_every_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 100)
    torch.manual_seed(0)
    tensors = [torch.randn(7), torch.randn(60, 3).bfloat16(), torch.arange(50), torch.empty(0), torch.randn(25)]
    before, rows = [tensor.clone() for tensor in tensors], tensors[1][10:20, 1:]
    kept = HostCopy([tensor.untyped_storage() for tensor in tensors], pin=False)
    assert kept.bytes == 28 + 360 + 400 + 100
    kept.take()
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)
    assert torch.equal(kept.tensor(rows), before[1][10:20, 1:])  # a view of one of them
    kept.give_back(lambda storage, nbytes: storage.resize_(nbytes))
    assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True))


@pytest.mark.parametrize("family", [save_qwen3, save_qwen35])
def test_a_checkpoint_is_captured_from_what_is_away(family: Any, groups: list[ScoredGroup], tmp_path: Path) -> None:
    step = make_step(family(tmp_path / "model"), Scenario(GRPO, groups, trainer=TrainerConfig(lr=1e-3)), None)
    for parameter in step.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    step.optimizer.update(scale=1.0)
    host = Host(step)
    part = Offload(host, moves=True)  # type: ignore[arg-type]
    saved: dict[str, Tensor] = parameters(step.model)
    moments = [value.clone() for _, _, value in host.optimizer.state()]
    for each in ALL:
        part.offload(each)
    host.state.capture(part.copy)
    for each in ALL:
        part.onload(each)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    host.state.write(folder)
    with torch.no_grad():
        for parameter in step.model.parameters():
            parameter.zero_()
    host.state.restore(folder)
    assert all(torch.equal(full(value), saved[name]) for name, value in parameters(step.model).items())
    restored = [value for _, _, value in host.optimizer.state()]
    assert len(restored) == len(moments) > 0
    assert all(torch.equal(one, other) for one, other in zip(restored, moments, strict=True))


def test_what_is_away_is_refused_by_name(ray_session: None, engine: Any, tiny_model: Path, tmp_path: Path) -> None:
    """On real ranks: a second offload, a step, a push and a restore while the parameters are away."""

    async def scenario() -> None:
        trainer = await started(make_trainer(tiny_model, tmp_path))
        await trainer.attach_offload(partial(Offload, moves=True))
        push = await make_push("ipc", trainer, [engine], tmp_path)
        await push.sync(1)
        await trainer.offload(TrainerMemory.parameters)
        with pytest.raises(TrainerError, match=r"trainer rank 0: parameters is offloaded already"):
            await trainer.offload(TrainerMemory.parameters)
        with pytest.raises(TrainerError, match=r"trainer rank 0: begin_step while offloaded: parameters"):
            await trainer.begin_step(version=2)
        with pytest.raises(SyncError, match=r"trainer rank 0: a push while offloaded: parameters"):
            await push.sync(2)
        with pytest.raises(TrainerError, match=r"trainer rank 0: restore while offloaded: parameters"):
            await trainer.restore(tmp_path, version=2)
        await trainer.onload(TrainerMemory.parameters)
        await trainer.onload(TrainerMemory.parameters)  # it is there
        assert (await push.sync(2)).version == 2
        await trainer.begin_step(version=3)
        with pytest.raises(TrainerError, match=r"optimizer cannot be offloaded while a step is open"):
            await trainer.offload(TrainerMemory.optimizer)
        await trainer.abort_step()
        await push.close()

    asyncio.run(scenario())


class Card:
    """A device module whose memory another process frees a while later."""

    def __init__(self, free: list[int]):
        self.free = free

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return (self.free.pop(0) if len(self.free) > 1 else self.free[0]), 100

    def synchronize(self, device: torch.device) -> None: ...

    def empty_cache(self) -> None: ...


def test_onload_waits_for_the_engine_to_let_go(
    path: Path, groups: list[ScoredGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(make_step(path, Scenario(GRPO, groups), None))
    part = Offload(host, moves=True)  # type: ignore[arg-type]
    part.offload(TrainerMemory.parameters)
    card = Card([0, 10, 2**40])
    monkeypatch.setattr(Offload, "_module", card)
    part.onload(TrainerMemory.parameters)
    assert card.free == [2**40]
    monkeypatch.undo()
    part.offload(TrainerMemory.parameters)
    monkeypatch.setattr(Offload, "_module", Card([2**20]))
    monkeypatch.setattr(module, "ROOM_SECONDS", 0.2)
    monkeypatch.setattr(part._copies[TrainerMemory.parameters], "bytes", 2**31)
    with pytest.raises(TrainerError, match=r"onload of parameters needs 2\.0 GiB on cpu, of which 0\.0 GiB were free"):
        part.onload(TrainerMemory.parameters)
