"""Adapters on two ranks, of the second model family, and on servers of `rollout.urls`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.errors import EngineError
from tests.rollout.adapters import adapter_engine, body_of, logprobs_differ, merged, tensors_of
from tests.rollout.support import HOT, address_of, host_spec, remote, request

pytestmark = pytest.mark.slow
ROUNDING = 5e-5


def long(version: int) -> Any:
    return request(f"a/{version}@0", group_size=4, temperature=HOT, max_tokens=200)


async def test_a_running_server_serves_adapters_of_several_hosts(
    ray_session: None, tiny_model: Path, tmp_path: Path
) -> None:
    """As after a restart of the driver: the adapters of the host before it are still there."""
    bodies = {version: body_of(tensors_of(tiny_model, version)) for version in (1, 2)}
    own = adapter_engine(tiny_model, tmp_path, name="engine 0", most=2)

    await own.start(300)
    try:
        await own.load_adapter(1, bodies[1])
        url, key = await address_of(own)
        other = remote(replace(host_spec(tmp_path, name="engine 1", url=url, key=key), serves_adapters=True))
        await other.start(60)
        with pytest.raises(EngineError, match="engine 1 has no adapter"):
            await other.generate(long(1))
        for version in (1, 2, 1, 2):
            assert await other.load_adapter(version, bodies[version]) == 1
        completions = await other.generate(long(2))
    finally:
        await own.stop()
    assert logprobs_differ(merged(tiny_model, 2), long(2), completions) < ROUNDING
