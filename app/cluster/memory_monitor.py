"""What the processes of a run hold, and whether a machine is about to run out of memory.

The kernel ends whatever is largest when a machine is full, without a word to anybody; a run that sees it coming saves
and says so.
"""

import os

from app.errors import RunError
from app.protocols import RolloutEngine, Trainer
from app.rollout.pool import EnginePool
from app.types import MemoryUse
from app.utils.process import memory_use

HOST_LIMIT = 0.97  # of a machine's memory
MIB = 1024 * 1024


class Memory:
    """Asks driver, ranks and engines; `check` looks at the last answers."""

    def __init__(self, trainer: Trainer, pool: EnginePool):
        self.trainer, self.pool = trainer, pool
        self._last: dict[str, MemoryUse] = {}
        self._peaks: dict[str, int] = {}  # phase → bytes of the fullest rank's device, since the last sample

    async def phase(self, name: str) -> None:
        """Note the ranks' device peaks of a phase that just ended."""
        peaks = [use.device_peak for use in await self.trainer.memory() if use.device_peak is not None]
        if peaks:
            self._peaks[name] = max(peaks)

    async def sample(self) -> dict[str, float]:
        """MiB by role (of the largest rank or engine), and the fullest machine's share in use."""
        found = {"driver": memory_use([os.getpid()])}
        found |= {f"trainer rank {rank}": use for rank, use in enumerate(await self.trainer.memory())}
        found |= {f"engine {place}": use for place, use in (await self.pool.each(RolloutEngine.memory)).items()}
        self._last = found
        metrics = {
            f"memory/{role}_rss_mib": max(use.resident for name, use in found.items() if name.startswith(role)) / MIB
            for role in ("driver", "trainer", "engine")
            if any(name.startswith(role) for name in found)
        }
        device = {f"memory/trainer_device_peak_{name}_mib": peak / MIB for name, peak in self._peaks.items()}
        self._peaks = {}
        return {**metrics, **device, "memory/host_used_fraction": max(use.host_used for use in found.values())}

    def check(self) -> None:
        """Raise `RunError` when a machine is nearly full."""
        for name, use in self._last.items():
            if use.host_used > HOST_LIMIT:
                largest = max(self._last, key=lambda each: self._last[each].resident)
                raise RunError(
                    f"the machine of {name} has used {use.host_used:.1%} of its memory: the run ends before the kernel "
                    f"ends a part of it (the largest of ours is {largest} with "
                    f"{self._last[largest].resident / MIB:.0f} MiB)"
                )
