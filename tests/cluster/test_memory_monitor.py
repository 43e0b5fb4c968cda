"""Memory metrics: by role, and by phase where a device reports peaks."""

import asyncio

import pytest

from app.cluster import memory_monitor
from app.cluster.memory_monitor import MIB, MemoryMonitor
from app.errors import EngineLost, RunError
from app.rollout.engine.pool import EnginePool
from app.types import MemoryUse
from tests.simulation import SimEngine, SimTrainer


class TrainerWithPeaks(SimTrainer):
    """Two ranks with the given device peaks, one pair per `memory` call."""

    peaks: list[tuple[int, int]]

    async def memory(self) -> list[MemoryUse]:
        return [MemoryUse(5 * MIB, 0.5, peak) for peak in self.peaks.pop(0)]


def engine(resident: int = 0, host_used: float = 0.0) -> SimEngine:
    """An engine with this memory use."""

    class MeasuredEngine(SimEngine):
        async def memory(self) -> MemoryUse:
            return MemoryUse(resident, host_used)

    return MeasuredEngine(lambda _: 1.0, lambda *_: True)


def fail(text: str) -> None:
    raise AssertionError(f"warned: {text}")


async def test_peaks_are_those_of_the_fullest_device_in_each_phase() -> None:
    trainer = TrainerWithPeaks()
    trainer.peaks = [(3 * MIB, 7 * MIB), (20 * MIB, 10 * MIB), (0, 0), (0, 0)]
    monitor = MemoryMonitor(trainer, EnginePool([engine()]), fail)
    await monitor.record_peaks("generate")
    await monitor.record_peaks("train")
    metrics = await monitor.sample()
    assert metrics["memory/trainer_device_peak_generate_mib"] == 7
    assert metrics["memory/trainer_device_peak_train_mib"] == 20
    assert metrics["memory/trainer_rss_mib"] == 5
    assert "memory/trainer_device_peak_train_mib" not in await monitor.sample()  # of the next step


def test_an_engine_keeps_its_name_while_another_one_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_monitor, "memory_use", lambda _: MemoryUse(MIB, 0.1))  # of the driver
    pool = EnginePool([engine(), engine(20 * MIB, 0.98)])
    pool.mark_lost(pool.engines[0], EngineLost("engine 0 was killed"))
    monitor = MemoryMonitor(SimTrainer(), pool, fail)
    metrics = asyncio.run(monitor.sample())
    assert (metrics["memory/engine_rss_mib"], metrics["memory/host_used_fraction"]) == (20, 0.98)
    with pytest.raises(RunError, match=r"the machine of engine 1 has used 98\.0% .* engine 1 with 20 MiB"):
        monitor.check()
