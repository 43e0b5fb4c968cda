"""How often a sync is compared with an export: until two comparisons have succeeded."""

from collections.abc import Awaitable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.config.weight_sync import Verify
from app.errors import SyncError
from app.weight_sync.sender import Sender
from app.weight_sync.verify import EXPORT_CHECKS, Verifier


class Engine:
    """Answers with the hash of what it loaded last: the sync, or the export."""

    name = "engine 0"
    loaded = "synced"
    exports = 0

    def __init__(self, exported: str) -> None:
        self.exported = exported
        self.asked: list[list[str]] = []

    async def update(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        if route == "update_weights_from_disk":
            self.loaded = self.exported
            self.exports += 1
        checksums = {"model.norm.weight": self.loaded, "visual.norm.weight": f"undefined at {len(self.asked)}"}
        self.asked.append(body.get("skip_tensor_list", []))
        kept = {name: value for name, value in checksums.items() if not any(part in name for part in self.asked[-1])}
        return {"ranks": [{"checksums": kept}]}


async def verify(verifier: Verifier, engine: Engine) -> None:
    async def gather(phase: str, calls: Mapping[str, Awaitable[Any]]) -> dict[str, Any]:
        return {name: await call for name, call in calls.items()}

    async def call(extension: str, method: object, **_: object) -> list[Any]:
        return [["visual."]] if method is Sender.unsynced else [None]

    engine.loaded = "synced"
    deadline: Any = SimpleNamespace(version=1, gather=gather)
    trainer: Any = SimpleNamespace(call=call)
    engines: Any = [engine]
    await verifier.after_sync(deadline, trainer, engines, flush_cache=True)


async def test_a_sync_that_failed_its_check_is_checked_again_however_often(tmp_path: Path) -> None:
    """A failed sync is repeated: a check that ran out would accept the same weights."""
    verifier = Verifier(Verify.first, tmp_path / "verify")
    for _ in range(2 * EXPORT_CHECKS):
        with pytest.raises(SyncError, match=r"model\.norm\.weight"):
            await verify(verifier, Engine("other"))

    engine = Engine("synced")
    for _ in range(2 * EXPORT_CHECKS):
        await verify(verifier, engine)
    assert engine.exports == EXPORT_CHECKS
