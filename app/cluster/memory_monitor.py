"""Memory use of the run's processes, and an early end before a machine runs out of memory.

The kernel's OOM killer kills a process without warning. A run that stops earlier can save a checkpoint and report the
cause.
"""

import os

from app.errors import RunError
from app.protocols import RolloutEngine, Trainer
from app.rollout.pool import EnginePool
from app.types import MemoryUse
from app.utils.process import memory_use
from app.utils.units import MIB

HOST_LIMIT = 0.97  # fraction of a machine's memory


class MemoryMonitor:
    """Samples the memory of driver, trainer ranks and engines.

    In each step: `record_peaks(phase)` after each phase, then `sample` for the metrics, then `check`.
    """

    def __init__(self, trainer: Trainer, pool: EnginePool):
        self.trainer = trainer
        self.pool = pool
        self._last_sample: dict[str, MemoryUse] = {}  # by process: "driver", "trainer rank 0", "engine 0"
        self._peaks: dict[str, int] = {}  # phase → bytes on the fullest device, since the last sample

    async def record_peaks(self, phase: str) -> None:
        """Record the device memory peaks of the trainer ranks in the phase that just ended."""
        peaks = [use.device_peak for use in await self.trainer.memory() if use.device_peak is not None]
        if peaks:
            self._peaks[phase] = max(peaks)

    async def sample(self) -> dict[str, float]:
        """Return the memory metrics: MiB of the largest process by role, and the fullest machine's used fraction."""
        sample = {"driver": memory_use([os.getpid()])}
        for rank, use in enumerate(await self.trainer.memory()):
            sample[f"trainer rank {rank}"] = use
        for index, use in (await self.pool.each(RolloutEngine.memory)).items():
            sample[f"engine {index}"] = use
        self._last_sample = sample

        metrics = {"memory/host_used_fraction": max(use.host_used for use in sample.values())}
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
