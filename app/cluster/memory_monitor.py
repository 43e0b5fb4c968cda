"""Memory use of the run's processes, and an early end before a machine runs out of memory.

The kernel's OOM killer kills a process without warning. A run that stops earlier can save a checkpoint and report the
cause.

Invariant: only `check` can end a run. What cannot be measured is missing from the metrics, with one warning.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from app.errors import RunError, one_line
from app.protocols import RolloutEngine, Trainer
from app.rollout.engine.pool import EnginePool
from app.types import MemoryUse
from app.utils.process import memory_use
from app.utils.units import MIB

HOST_LIMIT = 0.97  # fraction of a machine's memory
MEASURE_TIMEOUT_S = 10.0  # deadline of one measurement
log = logging.getLogger(__name__)


@dataclass(eq=False)
class MemoryMonitor:
    """Samples the memory of driver, trainer ranks and engines.

    In each step: `record_peaks(phase)` after each phase, then `sample` for the metrics, then `check`.
    """

    trainer: Trainer
    pool: EnginePool
    warn: Callable[[str], None]  # called once, with a sentence, when something cannot be measured
    _warned: bool = False
    _last_sample: dict[str, MemoryUse] = field(default_factory=dict)  # by process: "trainer rank 0", "engine 0" …
    _peaks: dict[str, int] = field(default_factory=dict)  # phase → bytes on the fullest device, since the last sample

    async def record_peaks(self, phase: str) -> None:
        """Record the device memory peaks of the trainer ranks in the phase that just ended."""
        async with self._measuring("trainer"):
            peaks = [use.device_peak for use in await self.trainer.memory() if use.device_peak is not None]
            if peaks:
                self._peaks[phase] = max(peaks)

    async def sample(self) -> dict[str, float]:
        """Return the memory metrics: MiB of the largest process by role, and the fullest machine's used fraction."""
        sample: dict[str, MemoryUse] = {}
        async with self._measuring("driver"):
            sample["driver"] = memory_use([os.getpid()])
        async with self._measuring("trainer"):
            sample |= {f"trainer rank {rank}": use for rank, use in enumerate(await self.trainer.memory())}
        async with self._measuring("engine"):
            uses = await self.pool.each(RolloutEngine.memory)
            sample |= {f"engine {index}": use for index, use in uses.items()}
        self._last_sample = sample

        metrics: dict[str, float] = {}
        if sample:
            metrics["memory/host_used_fraction"] = max(use.host_used for use in sample.values())
        for role in ("driver", "trainer", "engine"):
            resident = [use.resident for name, use in sample.items() if name.startswith(role)]
            if resident:
                metrics[f"memory/{role}_rss_mib"] = max(resident) / MIB

        for phase, peak in self._peaks.items():
            metrics[f"memory/trainer_device_peak_{phase}_mib"] = peak / MIB
        self._peaks = {}
        return metrics

    def check(self) -> None:
        """Raise `RunError` if a machine was nearly out of memory in the last sample."""
        for name, use in self._last_sample.items():
            if use.host_used > HOST_LIMIT:
                largest = max(self._last_sample, key=lambda each: self._last_sample[each].resident)
                raise RunError(
                    f"the machine of {name} has used {use.host_used:.1%} of its memory: the run ends before the "
                    f"kernel kills one of its processes (the largest process of the run is {largest} with "
                    f"{self._last_sample[largest].resident / MIB:.0f} MiB)"
                )

    @asynccontextmanager
    async def _measuring(self, role: str) -> AsyncIterator[None]:
        """Leave the block, with one warning, if the processes cannot be measured."""
        try:
            async with asyncio.timeout(MEASURE_TIMEOUT_S):
                yield
        except Exception as error:  # a broken component fails in its next call
            log.info("the memory of %s was not measured", role, exc_info=True)
            if not self._warned:
                self._warned = True
                self.warn(f"no memory metrics of the {role} processes: {one_line(error)}")
