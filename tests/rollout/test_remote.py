"""The driver's proxy of an engine: hosts that Ray does not start, and calls without a reply."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import ray

from app.errors import EngineLost
from app.rollout.engine import remote as remotes
from app.rollout.engine.host import EngineHost
from app.rollout.engine.remote import RemoteEngine
from tests.rollout.support import host_spec, remote

pytestmark = pytest.mark.usefixtures("ray_session")


def test_a_host_that_ray_never_schedules_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remotes, "START_GRACE_S", 1.0)
    host: Any = ray.remote(EngineHost).options(num_cpus=9).remote(host_spec(tmp_path, name="engine 2"))  # Ray has 8
    with pytest.raises(EngineLost) as late:
        asyncio.run(asyncio.wait_for(RemoteEngine("engine 2", host).start(1.0), 60))
    ray.kill(host)
    assert re.search("engine 2: .*rollout.start_timeout_s=1 s", str(late.value))


def test_a_host_that_cannot_be_built_is_named_with_its_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    engine = remote(host_spec(tmp_path / "file", name="engine 2"))  # the log's folder is a file
    with pytest.raises(EngineLost, match=r"^engine 2: .*start: FileExistsError: "):
        asyncio.run(asyncio.wait_for(engine.start(60), 120))


def test_a_call_without_a_reply_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = remote(host_spec(tmp_path, name="engine 2"))
    monkeypatch.setattr(remotes, "CALL_TIMEOUT_S", 0.0)
    with pytest.raises(EngineLost, match=r"^engine 2: .*resume .*0 s$"):
        asyncio.run(engine.resume())
    ray.kill(engine.actor)
