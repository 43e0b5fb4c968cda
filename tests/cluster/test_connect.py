"""Joining a cluster whose head does not answer."""

import pytest

from app.cluster.connect import connect
from app.device import device_of
from app.errors import RunError
from app.utils.net import free_port
from tests.compose import composed


def test_a_head_that_accepts_no_connection_is_named_after_the_deadline() -> None:
    """Ray alone would try for minutes."""
    address = f"127.0.0.1:{free_port()}"
    config = composed(f"cluster.address={address}", "cluster.timeout_s=0.5")
    with pytest.raises(RunError) as refused:
        connect(config, device_of(config.device.kind))
    assert str(refused.value) == (
        f"cluster.address={address} cannot be joined: nothing accepted a connection within cluster.timeout_s=0.5 s: "
        "[Errno 111] Connection refused"
    )
