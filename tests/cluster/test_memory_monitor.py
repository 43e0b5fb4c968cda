"""Memory metrics: by role, and by phase where a device reports peaks."""

import asyncio
import re

import pytest

from app.cluster import memory_monitor
from app.cluster.memory_monitor import MIB, MemoryMonitor
from app.errors import EngineError, EngineLost, RunError, TrainerError
from app.rollout.pool import EnginePool
from app.types import MemoryUse
from tests.simulation import SimEngine, SimTrainer, run_virtual, virtual


class TrainerWithPeaks(SimTrainer):
    """Two ranks with the given device peaks, one pair per `memory` call."""

    peaks: list[tuple[int | None, int | None]]

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


def metrics_of_a_step(*peaks: tuple[int | None, int | None]) -> dict[str, float]:
    trainer = TrainerWithPeaks()
    trainer.peaks = list(peaks)

    async def step() -> dict[str, float]:
        monitor = MemoryMonitor(trainer, EnginePool([engine()]), fail)
        await monitor.record_peaks("generate")
        await monitor.record_peaks("train")
        metrics = await monitor.sample()
        assert "memory/trainer_device_peak_train_mib" not in await monitor.sample()  # of the next step
        return metrics

    return asyncio.run(step())


def test_peaks_are_those_of_the_fullest_device_in_each_phase() -> None:
    metrics = metrics_of_a_step((3 * MIB, 7 * MIB), (20 * MIB, 10 * MIB), (0, 0), (0, 0))
    assert metrics["memory/trainer_device_peak_generate_mib"] == 7
    assert metrics["memory/trainer_device_peak_train_mib"] == 20
    assert metrics["memory/trainer_rss_mib"] == 5


def test_a_cpu_has_no_device_peak() -> None:
    assert not [name for name in metrics_of_a_step(*4 * [(None, None)]) if "device" in name]


def test_a_full_machine_ends_the_run() -> None:
    monitor = MemoryMonitor(SimTrainer(), EnginePool([engine()]), fail)
    monitor._last_sample = {"trainer rank 1": MemoryUse(9 * MIB, 0.98), "engine 0": MemoryUse(20 * MIB, 0.2)}
    with pytest.raises(RunError, match=r"the machine of trainer rank 1 has used 98\.0% .* engine 0 with 20 MiB"):
        monitor.check()


def test_an_engine_keeps_its_name_while_another_one_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_monitor, "memory_use", lambda _: MemoryUse(MIB, 0.1))  # of the driver
    pool = EnginePool([engine(), engine(20 * MIB, 0.98)])
    pool.mark_lost(pool.engines[0], EngineLost("engine 0 was killed"))
    monitor = MemoryMonitor(SimTrainer(), pool, fail)
    assert asyncio.run(monitor.sample())["memory/engine_rss_mib"] == 20
    with pytest.raises(RunError, match=r"the machine of engine 1 has used 98\.0% .* engine 1 with 20 MiB"):
        monitor.check()


class FailingTrainer(SimTrainer):
    """Cannot say how much memory it uses."""

    async def memory(self) -> list[MemoryUse]:
        raise TrainerError("rank 0 .*memory: OSError: on purpose")


class SilentTrainer(SimTrainer):
    async def memory(self) -> list[MemoryUse]:
        await asyncio.Event().wait()
        raise AssertionError


@pytest.mark.parametrize(
    ("trainer", "reason"),
    [
        (FailingTrainer(), "rank 0 .*memory: OSError: on purpose"),
        (SilentTrainer(), "within 10 s"),
    ],
)
@virtual
async def test_ranks_whose_memory_cannot_be_measured_are_missing_with_one_warning(
    trainer: SimTrainer, reason: str
) -> None:
    warnings: list[str] = []

    monitor = MemoryMonitor(trainer, EnginePool([engine(7 * MIB)]), warnings.append)
    await monitor.record_peaks("train")
    await monitor.sample()
    metrics = await monitor.sample()
    assert set(metrics) == {"memory/host_used_fraction", "memory/driver_rss_mib", "memory/engine_rss_mib"}
    (warning,) = warnings
    assert re.search(f"trainer processes .*{reason}", warning)


def test_an_engine_that_refuses_to_measure_its_memory_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuses(self: SimEngine) -> MemoryUse:
        raise EngineError("engine 0: memory failed: on purpose")

    monkeypatch.setattr(SimEngine, "memory", refuses)
    warnings: list[str] = []
    pool = EnginePool([SimEngine(lambda _: 1.0, lambda *_: True)])
    metrics = run_virtual(MemoryMonitor(SimTrainer(), pool, warnings.append).sample())
    assert set(metrics) == {"memory/host_used_fraction", "memory/driver_rss_mib", "memory/trainer_rss_mib"}
    assert len(warnings) == 1


def test_a_driver_whose_memory_cannot_be_read_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(pids: list[int]) -> MemoryUse:
        raise PermissionError("/proc is hidden on purpose")

    monkeypatch.setattr(memory_monitor, "memory_use", unreadable)
    warnings: list[str] = []
    metrics = run_virtual(MemoryMonitor(SimTrainer(), EnginePool([engine()]), warnings.append).sample())
    assert "memory/driver_rss_mib" not in metrics
    (warning,) = warnings
    assert re.search("driver processes .*/proc is hidden", warning)
