"""The process group of a sync: where it listens, and a trainer that does not answer."""

import asyncio

import psutil
import pytest

from app.errors import SyncError
from app.weight_sync.deadlines import Deadline
from app.weight_sync.transport.collective import CollectiveTransport
from app.weight_sync.transport.process_group import SyncProcessGroup


def test_the_store_listens_at_the_given_address_only() -> None:
    group = SyncProcessGroup(backend="gloo", address="127.0.0.1", world_size=2, name="sync", timeout_s=1)
    connections = psutil.Process().net_connections("tcp")
    listening = [each.laddr for each in connections if each.status == psutil.CONN_LISTEN]
    assert [each.ip for each in listening if each.port == group.port] == ["127.0.0.1"]
    group._joining.join(60)  # nobody else joins


class SilentTrainer:
    """Ranks that do not answer."""

    async def source(self) -> tuple[str, int]:
        await asyncio.sleep(3600)
        raise AssertionError


def test_a_trainer_that_does_not_answer_is_named_when_the_process_group_is_built() -> None:
    transport = CollectiveTransport(backend="gloo", tensor_parallel=1)
    connecting = transport.connect(Deadline(version=3, timeout_s=0.2), SilentTrainer(), [])  # type: ignore[arg-type]
    with pytest.raises(SyncError) as late:
        asyncio.run(asyncio.wait_for(connecting, 60))
    assert str(late.value) == (
        "weight sync of policy 3 did not finish building the process group within weight_sync.timeout_s=0.2 s: "
        "no reply from trainer ranks"
    )
