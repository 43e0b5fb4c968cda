"""Checks that a sync loaded the right bytes into the engines: `weight_sync.verify`.

An engine holds fused, tensor-parallel parameters, which cannot be compared with the trainer's one by one. So the
trainer exports a checkpoint, the engine loads it with its own checkpoint loader, and its parameters are hashed before
and after. Equal hashes of every synced parameter on every rank mean that the sync and the checkpoint loader agree.
Engines are compared with each other by the same hashes, which is cheap. Parameters that no sync sends, such as those of
a vision tower, are left out: where an engine's memory was released, they are undefined. Values that an engine derives
from its parameters are not hashed: `mode=parity` covers them by comparing log-probabilities.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.config.weight_sync import Verify
from app.errors import SyncError
from app.protocols import RolloutEngine
from app.trainer.remote import RemoteTrainer
from app.weight_sync.sender import Sender
from app.weight_sync.transport.base import SENDER_EXTENSION, TRAINER_RANKS, Deadline

EXPORT_CHECKS = 2  # the first sync, which proves names and shapes, and the first of a trained policy
NAMED = 3  # parameters in a message
Hashes = Mapping[tuple[int, str], str]  # by tensor-parallel rank and engine parameter


class Verifier:
    """Verifies each sync while the engines are still paused. Rank 0 and the engines need access to `folder`."""

    def __init__(self, verify: Verify, folder: Path):
        self.verify = verify
        self.folder = folder
        self._checks_left = 0 if verify is Verify.never else EXPORT_CHECKS
        self._unsynced: list[str] | None = None  # parts of the names of parameters that a sync leaves as they are

    async def after_sync(
        self, deadline: Deadline, trainer: RemoteTrainer, engines: Sequence[RolloutEngine], *, flush_cache: bool
    ) -> None:
        """Verify the engines. Raises `SyncError` naming the engine, its rank and the parameters that differ."""
        compare_engines = self.verify is Verify.always and len(engines) > 1
        if not self._checks_left and not compare_engines:
            return
        if self._unsynced is None:
            naming = trainer.call(SENDER_EXTENSION, Sender.unsynced)
            self._unsynced = (await deadline.gather("verify: names", {TRAINER_RANKS: naming}))[TRAINER_RANKS][0]
        synced = await self._hashes(deadline, engines)

        if compare_engines:
            (first, reference), *others = synced.items()
            for name, hashes in others:
                expect_equal(deadline.version, f"{name} differs from {first}", reference, hashes)

        if self._checks_left:
            exported = await self._load_export(deadline, trainer, engines, flush_cache)
            for name, hashes in synced.items():
                problem = f"{name} differs from the exported checkpoint"
                expect_equal(deadline.version, problem, exported[name], hashes)
            self._checks_left -= 1  # only now: a sync that failed its check is repeated, and checked again

    async def _load_export(
        self, deadline: Deadline, trainer: RemoteTrainer, engines: Sequence[RolloutEngine], flush_cache: bool
    ) -> dict[str, Hashes]:
        """Load an export of the parameters into every engine; return the engines' hashes afterwards."""
        path = self.folder / f"policy_{deadline.version}"
        shutil.rmtree(path, ignore_errors=True)
        try:
            export = trainer.call(SENDER_EXTENSION, Sender.export, folder=path)
            await deadline.gather("verify: export", {TRAINER_RANKS: export})
            body = {"model_path": str(path), "flush_cache": flush_cache, "weight_version": str(deadline.version)}
            calls = {engine.name: engine.update("update_weights_from_disk", body) for engine in engines}
            await deadline.gather("verify: loading the export", calls)
            return await self._hashes(deadline, engines)
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    async def _hashes(self, deadline: Deadline, engines: Sequence[RolloutEngine]) -> dict[str, Hashes]:
        body: dict[str, Any] = {"action": "checksum"}
        if self._unsynced:
            body["skip_tensor_list"] = self._unsynced  # undefined after memory was released
        calls = {engine.name: engine.update("weights_checker", body) for engine in engines}
        replies = await deadline.gather("verify: checksums", calls)
        return {
            name: {
                (rank, parameter): checksum
                for rank, answer in enumerate(reply["ranks"])
                for parameter, checksum in answer["checksums"].items()
            }
            for name, reply in replies.items()
        }


def expect_equal(version: int, problem: str, expected: Hashes, actual: Hashes) -> None:
    """Raise `SyncError` with the first parameters that differ."""
    differing = sorted(key for key in expected.keys() | actual.keys() if expected.get(key) != actual.get(key))
    if differing:
        named = ", ".join(f"{name} (rank {rank})" for rank, name in differing[:NAMED])
        more = f" and {len(differing) - NAMED} more" if len(differing) > NAMED else ""
        raise SyncError(f"weight sync of policy {version}: weight_sync.verify found that {problem} in {named}{more}")
