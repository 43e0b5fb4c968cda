"""Adapters that trainer ranks hand to a real server: exact for every version, beside requests, without leaks."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.config.weight_sync import WeightSyncConfig
from app.errors import SyncError
from app.model.hf_directory import locate
from app.model.lora.names import adapter_tensors
from app.rollout.engine.remote import RemoteEngine
from app.types import Completion
from app.weight_sync.adapters import AdapterSynchronizer
from tests.compose import composed
from tests.rollout.adapters import LORA, SIZE, adapter_engine, logprobs_differ, merged, noise
from tests.rollout.support import HOT, in_flight, request, without_end
from tests.waiting import until
from tests.weight_sync.support import killed, make_trainer, started

ROUNDING = 5e-5
ROUNDING_QWEN35 = 5e-5
SMALL = 0.1  # of the entries of A and B: larger ones amplify the rounding of linear attention


class RandomAdapters:
    """An extension of a trainer rank that sets its adapters to noise."""

    def __init__(self, trainer_rank: Any) -> None:
        self.adapters = dict(adapter_tensors(trainer_rank.model))

    def set(self, seed: int, size: float) -> None:
        """Whatever the number of ranks, the same adapters."""
        from torch.distributed.tensor import DTensor, distribute_tensor

        for name, parameter in self.adapters.items():
            full = noise(name, tuple(parameter.shape), seed, size)
            if isinstance(parameter, DTensor):
                full = distribute_tensor(full, parameter.device_mesh, parameter.placements)
            parameter.data.copy_(full)


async def adapter_trainer(model: Path, folder: Path, *, ranks: int = 1) -> Any:
    """Ranks that train adapters, set up, with the extension `random`."""
    trainer = await started(make_trainer(model, folder, ranks=ranks, lora=LORA), weights=False)
    await trainer.attach("random", RandomAdapters)
    return trainer


async def set_adapters(trainer: Any, seed: int, size: float = SIZE) -> None:
    await trainer.call("random", RandomAdapters.set, seed=seed, size=size)


async def adapter_synchronizer(trainer: Any, engines: list[Any], *, one_machine: bool = True) -> AdapterSynchronizer:
    synchronizer = AdapterSynchronizer(
        trainer, dict(enumerate(engines)), WeightSyncConfig(timeout_s=60.0), tensor_parallel=1, one_machine=one_machine
    )
    await synchronizer.prepare()
    return synchronizer


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its completions end at their token limit."""
    return without_end(tiny_model, tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(engine_with_adapters: RemoteEngine) -> RemoteEngine:
    return engine_with_adapters


@pytest.fixture(scope="module")
def trainer(
    request: pytest.FixtureRequest, ray_session: None, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    made = asyncio.run(adapter_trainer(model, tmp_path_factory.mktemp("trainer"), ranks=request.param))
    with killed(*made.ranks):
        yield made


@pytest.mark.parametrize(
    ("trainer", "one_machine"), [(1, False), (2, True)], indirect=["trainer"], ids=["one rank, http", "two ranks"]
)
async def test_every_version_is_served_as_it_is_trained_beside_requests_of_the_version_before(
    one_machine: bool, trainer: Any, engine: RemoteEngine, model: Path
) -> None:
    synchronizer = await adapter_synchronizer(trainer, [engine], one_machine=one_machine)
    sampled: dict[int, list[Completion]] = {}
    running: asyncio.Task[list[Completion]] | None = None
    for version in (1, 2, 3):
        await set_adapters(trainer, version)
        report = await synchronizer.sync(version)
        assert report.adapters in (1, 2)  # the one before is unloaded when its last request ends
        assert report.seconds["pause"] == 0
        if running is not None:
            sampled[version - 1] = await running
        running = await in_flight(engine, request(f"a/{version}@0", temperature=HOT, max_tokens=300), running=4)
    assert running is not None
    sampled[3] = await running
    await synchronizer.close()
    for version, completions in sampled.items():
        assert {span.version for each in completions for span in each.spans} == {version}
        given = request(temperature=HOT)
        differences = {seed: logprobs_differ(merged(model, seed), given, completions) for seed in (1, 2, 3)}
        assert {seed: difference < ROUNDING for seed, difference in differences.items()} == {
            seed: seed == version for seed in (1, 2, 3)
        }


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_adapters_of_linear_attention_are_served_as_they_are_trained(ray_session: None, tmp_path: Path) -> None:
    """Qwen3.5: the fused projection is served in its parts. Its engine rounds more: tests/rollout/test_qwen35.py."""
    model = locate(composed("model=tiny_qwen35").model)
    engine = adapter_engine(model, tmp_path, name="engine 0", disable_radix_cache=True)
    await engine.start(300)
    trainer = await adapter_trainer(model, tmp_path / "trainer", ranks=2)
    sampled = {}
    with killed(*trainer.ranks):
        for one_machine in (True, False):
            synchronizer = await adapter_synchronizer(trainer, [engine], one_machine=one_machine)
            for version in (1, 2):
                await set_adapters(trainer, version, SMALL)
                await synchronizer.sync(version)
                sampled[one_machine, version] = await engine.generate(request(f"q/{version}{one_machine}@0"))
            await synchronizer.close()
        await engine.end()
    for (_, version), completions in sampled.items():
        differences = [logprobs_differ(merged(model, seed, SMALL), request(), completions) for seed in (1, 2)]
        assert differences[version - 1] < ROUNDING_QWEN35
        assert differences[2 - version] > 0.01


@pytest.mark.parametrize("trainer", [2], indirect=True)
async def test_a_server_that_is_killed_in_mid_load_costs_nothing_but_the_retry(
    trainer: Any, engine: RemoteEngine, model: Path, tmp_path: Path
) -> None:
    """The survivor goes on under a complete adapter, and the replacement gets the same version."""
    doomed = adapter_engine(model, tmp_path, name="engine 1")
    info = await doomed.start(300)
    synchronizer = await adapter_synchronizer(trainer, [engine, doomed])
    await set_adapters(trainer, 1)
    await synchronizer.sync(1)

    scheduler = next(
        each for each in psutil.Process(info["pid"]).children(recursive=True) if "sched" in " ".join(each.cmdline())
    )
    log = tmp_path / "engine_1.log"
    scheduler.suspend()  # the load does not return
    await set_adapters(trainer, 2)
    syncing = asyncio.create_task(synchronizer.sync(2))
    await asyncio.to_thread(until, lambda: loads(log) == 2, 60)
    os.killpg(info["pid"], signal.SIGKILL)
    with pytest.raises(SyncError) as failure:
        await syncing
    await doomed.end()
    await synchronizer.abort()

    replacement = adapter_engine(model, tmp_path / "again", name="engine 1")
    await replacement.start(300)
    synchronizer.set_engines({0: engine, 1: replacement})
    await synchronizer.sync(2)
    given = {"engine 0": engine, "engine 1": replacement}
    sampled = {name: await each.generate(request(f"k/{name}@0")) for name, each in given.items()}
    await replacement.end()
    await synchronizer.close()
    assert "weight sync of policy 2 failed at loading the adapter: engine 1" in str(failure.value)
    for completions in sampled.values():
        assert {span.version for each in completions for span in each.spans} == {2}
        assert logprobs_differ(merged(model, 2), request(), completions) < ROUNDING


def loads(log: Path) -> int:
    """Loads of adapters that a server began, by its log."""
    return log.read_text(errors="replace").count("Start load Lora adapter")
