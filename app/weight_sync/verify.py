"""Whether a push put the right bytes into the engines: `weight_sync.verify`.

The engine holds fused, tensor-parallel parameters, which cannot be compared with the trainer's one by one. So the
trainer exports a checkpoint, the engine loads it through its own loader of files, and its parameters are hashed before
and after: equal hashes of every parameter on every rank mean that the push and the loader agree. Engines are compared
with each other by the same hashes, and cheaply.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.config.weight_sync import Verify
from app.errors import SyncError
from app.protocols import RolloutEngine
from app.weight_sync.deadlines import Deadline
from app.weight_sync.sender import Sender
from app.weight_sync.transport.base import RANKS, SENDER, TrainerGroup, name_of

EXPORT_CHECKS = 2  # the first push, which proves names and shapes, and the first of a trained policy
NAMED = 3  # parameters in a message
Hashes = Mapping[tuple[int, str], str]  # (tensor-parallel rank, engine's parameter) → hash


class Verifier:
    """Called after each push, while the engines are still paused. `folder` is seen by rank 0 and by the engines."""

    def __init__(self, verify: Verify, folder: Path):
        self.verify, self.folder = verify, folder
        self._checks_left = 0 if verify is Verify.never else EXPORT_CHECKS

    async def after(
        self, waits: Deadline, ranks: TrainerGroup, engines: Sequence[RolloutEngine], *, flush: bool
    ) -> None:
        """Raises `SyncError` naming the engine, its rank and the parameters that differ."""
        compare_engines = self.verify is Verify.always and len(engines) > 1
        if not self._checks_left and not compare_engines:
            return
        pushed = await self._hashes(waits, engines)
        if compare_engines:
            (first, reference), *others = pushed.items()
            for name, hashes in others:
                expect_equal(waits.version, f"{name} differs from {first}", reference, hashes)
        if self._checks_left:
            self._checks_left -= 1
            await self._compare_with_export(waits, ranks, engines, pushed, flush)

    async def _compare_with_export(
        self,
        waits: Deadline,
        ranks: TrainerGroup,
        engines: Sequence[RolloutEngine],
        pushed: Mapping[str, Hashes],
        flush: bool,
    ) -> None:
        path = self.folder / f"policy_{waits.version}"
        shutil.rmtree(path, ignore_errors=True)
        try:
            await waits.gather("verify: export", {RANKS: ranks.call(SENDER, Sender.export, folder=path)})
            body = {"model_path": str(path), "flush_cache": flush, "weight_version": str(waits.version)}
            await waits.gather(
                "verify: loading the export",
                {
                    name_of(engine, i): engine.update("update_weights_from_disk", body)
                    for i, engine in enumerate(engines)
                },
            )
            loaded = await self._hashes(waits, engines)
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
        for name, hashes in pushed.items():
            expect_equal(waits.version, f"{name} differs from the exported checkpoint", loaded[name], hashes)

    async def _hashes(self, waits: Deadline, engines: Sequence[RolloutEngine]) -> dict[str, Hashes]:
        body = {"action": "checksum"}
        answers = await waits.gather(
            "verify: checksums",
            {name_of(engine, i): engine.update("weights_checker", body) for i, engine in enumerate(engines)},
        )
        return {who: hashes_of(answer) for who, answer in answers.items()}


def hashes_of(answer: Mapping[str, Any]) -> Hashes:
    """The parameters' hashes in an answer of `/weights_checker`."""
    return {
        (rank, name): value for rank, found in enumerate(answer["ranks"]) for name, value in found["checksums"].items()
    }


def expect_equal(version: int, who: str, right: Hashes, found: Hashes) -> None:
    """Raise `SyncError` with the first parameters that differ."""
    wrong = sorted(key for key in right.keys() | found.keys() if right.get(key) != found.get(key))
    if wrong:
        named = ", ".join(f"{name} (rank {rank})" for rank, name in wrong[:NAMED])
        more = f" and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
        raise SyncError(f"push of policy {version}: weight_sync.verify found that {who} in {named}{more}")
