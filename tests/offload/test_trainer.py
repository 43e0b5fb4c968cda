"""Offloaded tensors come back bit for bit, and nothing reads them in between."""

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
from app.offload.trainer import Offload
from app.trainer import host_state
from app.trainer.host_state import HostCopy
from app.trainer.rank import OFFLOAD
from app.types import ScoredGroup, TrainerMemory
from tests.model.support import save_qwen3, save_qwen35
from tests.offload.support import FakeRank, storages
from tests.trainer.ranks import run_on
from tests.trainer.support import Scenario, full, make_step, parameters, sampled, scored_groups, train
from tests.trainer.test_step import GRPO
from tests.weight_sync.support import make_synchronizer, make_trainer, started

pytestmark = pytest.mark.usefixtures("one_thread")  # small trainers compute faster on one
ALL = list(TrainerMemory)
WITH_REFERENCE = replace(GRPO, kl=Kl.k3, kl_coefficient=0.1)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3(tmp_path_factory.mktemp("policy"), tied=True)


@pytest.fixture(scope="module")
def groups(path: Path) -> list[ScoredGroup]:
    return sampled(path, scored_groups(4))


def two_steps(mesh: DeviceMesh | None, path: Path, groups: Sequence[ScoredGroup], *, offload: bool) -> dict[str, Any]:
    """Train two steps. With `offload`, offload and onload everything before, between and after them."""
    torch.manual_seed(0)
    scenario = Scenario(WITH_REFERENCE, groups, trainer=TrainerConfig(lr=1e-3), reference=path)
    step = make_step(path, scenario, mesh)
    rank = FakeRank(step, step.reference)
    offloader = Offload(rank, moves=True)  # type: ignore[arg-type]
    metrics = []
    freed = []
    for version in (1, 2):
        if offload:
            freed.append(_offload_and_onload(rank, offloader))
        metrics.append(train(step, scenario, version).metrics)
    if offload:
        freed.append(_offload_and_onload(rank, offloader))
    assert rank.reference is not None
    return {
        "losses": [[line[name] for name in ("loss/total", "grad_norm", "mismatch/kl")] for line in metrics],
        "parameters": parameters(step.model),
        "optimizer": [full(value) for _, _, value in rank.optimizer.state()],
        "reference": [full(value) for value in rank.reference.parameters()],
        "freed": freed,
    }


def _offload_and_onload(rank: FakeRank, offloader: Offload) -> int:
    """Return the bytes that were freed in between. Parameters that a forward had gathered are freed for good."""
    before = _all_storages(rank)
    for region in ALL:
        offloader.offload(region)
    assert sum(storage.nbytes() for storage in (*before, *_all_storages(rank))) == 0
    for region in ALL:
        offloader.onload(region)
    return sum(storage.nbytes() for storage in set(_all_storages(rank)))


def _all_storages(rank: FakeRank) -> list[torch.UntypedStorage]:
    assert rank.reference is not None
    return [
        *storages(rank.model.parameters()),
        *storages(rank.reference.parameters()),
        *storages(value for _, _, value in rank.optimizer.state()),
    ]


def on_ranks(mesh: DeviceMesh | None, path: Path, groups: Sequence[ScoredGroup]) -> dict[bool, dict[str, Any]]:
    return {offload: two_steps(mesh, path, groups, offload=offload) for offload in (False, True)}


@pytest.mark.parametrize("ranks", [0, 2])
def test_training_is_the_same_to_the_last_bit_and_pinned_memory_of_a_dropped_copy_is_returned(
    ranks: int, path: Path, groups: list[ScoredGroup], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    returned: list[set[TrainerMemory]] = []  # in this process, the copies that stay
    monkeypatch.setattr(Offload, "_free_pinned_memory", lambda offload: returned.append(set(offload._copies)))
    results = run_on(ranks, on_ranks, tmp_path / "out.pt", path, groups) if ranks else on_ranks(None, path, groups)
    still, moved = results[False], results[True]
    assert moved["losses"] == still["losses"]
    for name, parameter in still["parameters"].items():
        assert torch.equal(moved["parameters"][name], parameter), name
    for kind in ("optimizer", "reference"):
        assert len(moved[kind]) == len(still[kind]) > 0
        assert all(torch.equal(one, other) for one, other in zip(moved[kind], still[kind], strict=True))
    first, second, third = moved["freed"]  # the optimizer has its state after the first update
    assert 0 < 1.9 * first < second == third
    if not ranks:  # only the optimizer grows after its first update, and only its copy is replaced
        assert [TrainerMemory.optimizer in left for left in returned] == [False]


def test_chunks_smaller_than_a_tensor_keep_every_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_state, "CHUNK_BYTES", 100)
    torch.manual_seed(0)
    tensors = [torch.randn(7), torch.randn(60, 3).bfloat16(), torch.arange(50), torch.empty(0), torch.randn(25)]
    before = [tensor.clone() for tensor in tensors]
    rows = tensors[1][10:20, 1:]
    copy = HostCopy([tensor.untyped_storage() for tensor in tensors], pin=False)
    assert copy.bytes == 28 + 360 + 400 + 100
    copy.copy_from_device()
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)
    assert torch.equal(copy.read(rows), before[1][10:20, 1:])  # a view of one of them
    copy.copy_to_device(lambda storage, nbytes: storage.resize_(nbytes))
    assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True))


@pytest.mark.parametrize("family", [save_qwen3, save_qwen35])
def test_a_checkpoint_is_captured_from_offloaded_tensors(
    family: Any, groups: list[ScoredGroup], tmp_path: Path
) -> None:
    step = make_step(family(tmp_path / "model"), Scenario(GRPO, groups, trainer=TrainerConfig(lr=1e-3)), None)
    for parameter in step.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    step.optimizer.update(scale=1.0)
    rank = FakeRank(step)
    offloader = Offload(rank, moves=True)  # type: ignore[arg-type]
    saved: dict[str, Tensor] = parameters(step.model)
    moments = [value.clone() for _, _, value in rank.optimizer.state()]
    for region in ALL:
        offloader.offload(region)
    rank.state.capture(offloader.copy)
    for region in ALL:
        offloader.onload(region)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    rank.state.write(folder)
    with torch.no_grad():
        for parameter in step.model.parameters():
            parameter.zero_()
    rank.state.restore(folder)
    assert all(torch.equal(full(value), saved[name]) for name, value in parameters(step.model).items())
    restored = [value for _, _, value in rank.optimizer.state()]
    assert len(restored) == len(moments) > 0
    assert all(torch.equal(one, other) for one, other in zip(restored, moments, strict=True))


async def test_calls_that_need_offloaded_memory_raise_and_name_it(
    ray_session: None, engine: Any, tiny_model: Path, tmp_path: Path
) -> None:
    """On real ranks: a second offload, a step, a sync and a restore while the parameters are offloaded."""
    trainer = await started(make_trainer(tiny_model, tmp_path))
    await trainer.attach(OFFLOAD, partial(Offload, moves=True))
    push = await make_synchronizer("ipc", trainer, [engine], tmp_path)
    await push.sync(1)
    await trainer.offload(TrainerMemory.parameters)
    with pytest.raises(TrainerError, match="rank 0: parameters"):
        await trainer.offload(TrainerMemory.parameters)
    with pytest.raises(TrainerError, match=r"rank 0: begin_step .*parameters"):
        await trainer.begin_step(version=2)
    with pytest.raises(SyncError, match=r"rank 0: weight sync .*parameters"):
        await push.sync(2)
    with pytest.raises(TrainerError, match=r"rank 0: restore .*parameters"):
        await trainer.restore(tmp_path, version=2)
    await trainer.onload(TrainerMemory.parameters)
    await trainer.onload(TrainerMemory.parameters)  # idempotent
    assert (await push.sync(2)).version == 2
    await trainer.begin_step(version=3)
    with pytest.raises(TrainerError, match=r"optimizer .*step is open"):
        await trainer.offload(TrainerMemory.optimizer)
    await trainer.abort_step()
    await push.close()


class FakeDeviceModule:
    """A device module whose memory another process frees after a while."""

    def __init__(self, free: list[int]) -> None:
        self.free = free

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return (self.free.pop(0) if len(self.free) > 1 else self.free[0]), 100

    def synchronize(self, device: torch.device) -> None: ...

    def empty_cache(self) -> None: ...


def test_onload_waits_until_the_engine_released_its_memory(
    path: Path, groups: list[ScoredGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = FakeRank(make_step(path, Scenario(GRPO, groups), None))
    offloader = Offload(rank, moves=True)  # type: ignore[arg-type]
    offloader.offload(TrainerMemory.parameters)
    device = FakeDeviceModule([0, 10, 2**40])
    monkeypatch.setattr(Offload, "_device_module", device)
    offloader.onload(TrainerMemory.parameters)
    assert device.free == [2**40]
    monkeypatch.undo()
    offloader.offload(TrainerMemory.parameters)
    monkeypatch.setattr(Offload, "_device_module", FakeDeviceModule([2**20]))
    monkeypatch.setattr(module, "FREE_MEMORY_TIMEOUT_S", 0.2)
    monkeypatch.setattr(offloader._copies[TrainerMemory.parameters], "bytes", 2**31)
    with pytest.raises(TrainerError, match=r"parameters .*2\.0 GiB on cpu, .* 0\.0 GiB"):
        offloader.onload(TrainerMemory.parameters)
