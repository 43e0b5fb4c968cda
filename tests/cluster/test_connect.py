"""Joining a cluster whose head does not answer."""

import asyncio

import pytest

from app.cluster.connect import connect
from app.device import device_of
from app.errors import RunError
from app.utils.net import free_port
from tests.compose import composed


def test_a_signal_can_end_the_wait_for_a_head() -> None:
    config = composed(f"cluster.address=127.0.0.1:{free_port()}", "cluster.timeout_s=3600")

    async def interrupted() -> None:
        waiting = asyncio.create_task(connect(config, device_of(config.device.kind)))
        await asyncio.sleep(0.1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(asyncio.wait_for(interrupted(), 60))


def test_a_head_that_accepts_no_connection_is_named_after_the_deadline() -> None:
    """Ray alone would try for minutes."""
    address = f"127.0.0.1:{free_port()}"
    config = composed(f"cluster.address={address}", "cluster.timeout_s=0.5")
    with pytest.raises(RunError) as refused:
        asyncio.run(connect(config, device_of(config.device.kind)))
    assert str(refused.value) == (
        f"cluster.address={address} cannot be joined: nothing accepted a connection within cluster.timeout_s=0.5 s: "
        "Connection refused"
    )
