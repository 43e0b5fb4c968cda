"""Memory in the metrics: of every role, and of every phase where a device has a peak of its own."""

import asyncio

import pytest

from app.cluster.memory_monitor import MIB, Memory
from app.errors import RunError
from app.rollout.pool import EnginePool
from app.types import MemoryUse
from tests.simulation import SimEngine, SimTrainer


class Measured(SimTrainer):
    """Two ranks, whose devices' peaks since the last question are these."""

    peaks: list[tuple[int | None, int | None]]

    async def memory(self) -> list[MemoryUse]:
        return [MemoryUse(5 * MIB, 0.5, peak) for peak in self.peaks.pop(0)]


def sampled(*peaks: tuple[int | None, int | None]) -> dict[str, float]:
    trainer = Measured()
    trainer.peaks = list(peaks)

    async def step() -> dict[str, float]:
        memory = Memory(trainer, EnginePool([SimEngine(lambda _: 1.0, lambda *_: True)]))
        await memory.phase("generate")
        await memory.phase("train")
        found = await memory.sample()
        assert "memory/trainer_device_peak_train_mib" not in await memory.sample()  # of the next step
        return found

    return asyncio.run(step())


def test_peaks_are_those_of_the_fullest_device_in_each_phase() -> None:
    found = sampled((3 * MIB, 7 * MIB), (20 * MIB, 10 * MIB), (0, 0), (0, 0))
    assert found["memory/trainer_device_peak_generate_mib"] == 7
    assert found["memory/trainer_device_peak_train_mib"] == 20
    assert found["memory/trainer_rss_mib"] == 5


def test_a_cpu_has_no_device_peak() -> None:
    assert not [name for name in sampled(*4 * [(None, None)]) if "device" in name]


def test_a_full_machine_ends_the_run() -> None:
    trainer = Measured()
    memory = Memory(trainer, EnginePool([SimEngine(lambda _: 1.0, lambda *_: True)]))
    memory._last = {"trainer rank 1": MemoryUse(9 * MIB, 0.98), "engine 0": MemoryUse(20 * MIB, 0.2)}
    with pytest.raises(RunError, match=r"the machine of trainer rank 1 has used 98\.0% .* engine 0 with 20 MiB"):
        memory.check()
