"""What the processes of a run hold, and whether a machine is about to run out of memory.

The kernel ends whatever is largest when a machine is full, without a word to anybody; a run that sees it coming saves
and says so.
"""

import os

from app.errors import RunError
from app.process import memory_use
from app.protocols import Trainer
from app.rollout.pool import EnginePool
from app.types import MemoryUse

HOST_LIMIT = 0.97  # of a machine's memory
MIB = 1024 * 1024


class Memory:
    """Asks driver, ranks and engines; `check` looks at the last answers."""

    def __init__(self, trainer: Trainer, pool: EnginePool):
        self.trainer, self.pool = trainer, pool
        self._last: dict[str, MemoryUse] = {}

    async def sample(self) -> dict[str, float]:
        """MiB by role (of the largest rank or engine), and the fullest machine's share in use."""
        found = {"driver": memory_use([os.getpid()])}
        found |= {f"trainer rank {rank}": use for rank, use in enumerate(await self.trainer.memory())}
        found |= {f"engine {place}": use for place, use in enumerate(await self.pool.broadcast("memory"))}
        self._last = found
        metrics = {
            f"memory/{role}_rss_mib": max(use.resident for name, use in found.items() if name.startswith(role)) / MIB
            for role in ("driver", "trainer", "engine")
            if any(name.startswith(role) for name in found)
        }
        peaks = [use.device_peak for use in found.values() if use.device_peak is not None]
        device = {"memory/trainer_device_peak_mib": max(peaks) / MIB} if peaks else {}
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
