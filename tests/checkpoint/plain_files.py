"""A trainer whose checkpoint is two small files, for tests of what the driver does with checkpoints."""

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from app.checkpoint.manager import CheckpointManager
from app.checkpoint.run_state import RunState
from app.utils.files import ChecksumWriter
from tests.simulation import SimTrainer

DATA = "__0_0.distcp"


class PlainFiles(SimTrainer):
    """A trainer without tensors. `delay` virtual or real seconds pass before a write."""

    def __init__(self, delay: float = 0.0) -> None:
        super().__init__()
        self.delay = delay

    async def checkpoint_bytes(self) -> int:
        return 0

    async def capture(self) -> int:
        return 0

    async def write(self, folder: Path) -> dict[str, int]:
        await asyncio.sleep(self.delay)
        checksums = {}
        for name in (DATA, ".metadata"):
            with ChecksumWriter(folder / name) as file:
                file.write(f"{name} of {folder.name}".encode() * 1000)
            checksums[name] = file.crc32
        return checksums


def save(
    folder: Path,
    steps: Iterable[int],
    keep: int = 5,
    extra: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
) -> CheckpointManager:
    """Save checkpoints of these steps in the run at `folder`. `extra` and `model` are those of their `RunState`."""
    states = [RunState(step, step, extra or {}, model or {}) for step in steps]
    return save_states(CheckpointManager(folder, keep), states)


def save_states(checkpoints: CheckpointManager, states: Iterable[RunState]) -> CheckpointManager:
    async def work() -> None:
        for state in states:
            await checkpoints.save(PlainFiles(), state)
        await checkpoints.wait()

    asyncio.run(work())
    return checkpoints


def flip_a_byte(file: Path) -> None:
    """Damage a file without changing its size."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x41
    file.write_bytes(bytes(content))


def names(folder: Path) -> set[str]:
    """The names in the `checkpoints/` of a run."""
    return {each.name for each in (folder / "checkpoints").iterdir()}
