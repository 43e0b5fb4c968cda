"""Joining a cluster whose head does not answer, and a local Ray that does not start."""

import asyncio
import socket

import pytest

from app.cluster.connect import connect
from app.device import device_of
from app.errors import RunError
from app.utils.net import reserve_port
from tests.compose import composed


def address_of(silent: socket.socket) -> str:
    return f"127.0.0.1:{silent.getsockname()[1]}"


async def test_a_signal_can_end_the_wait_for_a_head() -> None:
    with reserve_port("127.0.0.1") as silent:
        config = composed(f"cluster.address={address_of(silent)}", "cluster.timeout_s=3600")
        waiting = asyncio.create_task(connect(config, device_of(config.device.kind)))
        await asyncio.sleep(0.1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(waiting, 60)


def test_a_head_that_accepts_no_connection_is_named_after_the_deadline() -> None:
    """Ray alone would try for minutes."""
    with reserve_port("127.0.0.1") as silent:
        address = address_of(silent)
        config = composed(f"cluster.address={address}", "cluster.timeout_s=0.5")
        with pytest.raises(RunError) as refused:
            asyncio.run(connect(config, device_of(config.device.kind)))
    for named in (f"cluster.address={address} ", "cluster.timeout_s=0.5 s", "Connection refused"):
        assert named in str(refused.value)
