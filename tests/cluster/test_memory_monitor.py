"""Memory metrics: by role, and by phase where a device reports peaks."""

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest

from app.cluster import memory_monitor
from app.cluster.memory_monitor import MIB, MemoryMonitor
from app.errors import EngineError, EngineLost, RunError
from app.rollout.engine.pool import EnginePool
from app.types import MemoryUse
from tests.simulation import SimEngine, SimTrainer, run_virtual


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


def test_an_engine_keeps_its_name_while_another_one_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_monitor, "memory_use", lambda _: MemoryUse(MIB, 0.1))  # of the driver
    pool = EnginePool([engine(), engine(20 * MIB, 0.98)])
    pool.mark_lost(pool.engines[0], EngineLost("engine 0 was killed"))
    monitor = MemoryMonitor(SimTrainer(), pool, fail)
    assert asyncio.run(monitor.sample())["memory/engine_rss_mib"] == 20
    with pytest.raises(RunError, match=r"the machine of engine 1 has used 98\.0% .* engine 1 with 20 MiB"):
        monitor.check()


async def refuses(_: object) -> None:
    raise EngineError("memory failed: on purpose")


async def never(_: object) -> None:
    await asyncio.Event().wait()


def unreadable(_: list[int]) -> None:
    raise PermissionError("/proc is hidden: on purpose")


@pytest.mark.parametrize(
    ("role", "owner", "name", "measure", "reason"),
    [
        ("trainer", SimTrainer, "memory", refuses, "on purpose"),
        ("trainer", SimTrainer, "memory", never, "TimeoutError"),
        ("engine", SimEngine, "memory", refuses, "on purpose"),
        ("driver", memory_monitor, "memory_use", unreadable, "on purpose"),
    ],
)
def test_processes_whose_memory_cannot_be_measured_are_missing_with_one_warning(
    role: str, owner: Any, name: str, measure: Callable[..., Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, measure)
    warnings: list[str] = []
    pool = EnginePool([SimEngine(lambda _: 1.0, lambda *_: True)])
    monitor = MemoryMonitor(SimTrainer(), pool, warnings.append)

    async def two_steps() -> dict[str, float]:
        await monitor.record_peaks("train")
        await monitor.sample()
        return await monitor.sample()

    measured = {"driver", "trainer", "engine"} - {role}
    assert set(run_virtual(two_steps())) == {"memory/host_used_fraction"} | {
        f"memory/{each}_rss_mib" for each in measured
    }
    (warning,) = warnings
    assert re.search(f"{role} processes: .*{reason}", warning)
