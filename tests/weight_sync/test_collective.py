"""The process group of a sync, against libraries with the habits of NCCL and HCCL."""

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from app.config.device import DeviceKind
from app.config.weight_sync import Verify
from app.device import device_of
from app.errors import SyncError
from app.weight_sync.transport.collective import BroadcastSender, wrap_errors
from app.weight_sync.transport.process_group import SyncProcessGroup
from tests.weight_sync.doubles import Doubles, EngineDouble, NcclDouble
from tests.weight_sync.support import killed, make_synchronizer, make_trainer, started

SOON_S = 3.0
TIMEOUT_S = 60.0


def process_group(backend: str, *, device: DeviceKind = DeviceKind.cuda, timeout_s: float = 5.0) -> SyncProcessGroup:
    Doubles()
    made = SyncProcessGroup(
        backend=backend,
        device=torch.device("cpu"),
        address="127.0.0.1",
        world_size=2,
        name=f"sync-{len(NcclDouble.made)}",
        timeout_s=timeout_s,
        abort_backend=device_of(device).abort_backend,
    )
    if backend != "gloo":
        made._joining.join(SOON_S)
        assert made.joined()
    return made


def seconds(call: Any) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


def test_the_store_listens_at_the_given_address_only() -> None:
    group = process_group("gloo", timeout_s=1)
    connections = psutil.Process().net_connections("tcp")
    listening = [each.laddr for each in connections if each.status == psutil.CONN_LISTEN]
    assert [each.ip for each in listening if each.port == group.port] == ["127.0.0.1"]
    group.abort()


def test_the_library_waits_longer_than_we_do() -> None:
    """NCCL's watchdog ends the process when its timeout passes. By then the sync has failed by ours."""
    process_group("nccl_double", timeout_s=300.0).abort()
    assert NcclDouble.made[-1].timeout.total_seconds() == 660


def test_a_broadcast_returns_once_all_members_have_received_it() -> None:
    group = process_group("nccl_double")
    group.broadcast(torch.zeros(8))
    double = NcclDouble.made[-1]
    double.members_take_part.set()
    threading.Timer(0.2, double.members_receive.set).start()
    assert 0.1 < seconds(lambda: group.wait(5.0)) < SOON_S
    group.abort()


@pytest.mark.parametrize(
    ("backend", "device", "expected"),
    [("nccl_double", DeviceKind.cuda, ["abort"]), ("hccl_double", DeviceKind.npu, ["abort_hccl_comm", "abort"])],
)
def test_an_abort_returns_while_the_first_broadcast_waits_for_a_member(
    backend: str, device: DeviceKind, expected: list[str]
) -> None:
    group = process_group(backend, device=device)
    assert seconds(lambda: group.broadcast(torch.zeros(8))) < 1
    assert seconds(group.abort) < SOON_S
    with pytest.raises(RuntimeError, match="aborted"):
        group.wait(5.0)
    with pytest.raises(RuntimeError, match="aborted"):
        group.broadcast(torch.zeros(8))
    assert NcclDouble.made[-1].calls == expected


def test_a_wait_ends_at_its_deadline_though_that_of_the_library_has_none() -> None:
    group = process_group("hccl_double", device=DeviceKind.npu)
    NcclDouble.made[-1].members_take_part.set()
    group.broadcast(torch.zeros(8))
    late = r"trainer rank 0: the broadcast failed: .*did not finish within weight_sync.timeout_s=0.2 s"
    with pytest.raises(SyncError, match=late), wrap_errors("the broadcast failed"):
        group.wait(0.2)
    group.abort()


def test_a_late_abort_leaves_the_next_process_group_alone() -> None:
    """It runs beside the other calls of a rank, in no order with them."""
    sender = BroadcastSender.__new__(BroadcastSender)
    sender._process_group = group = process_group("prompt_double")
    sender.leave("an earlier one")
    group.broadcast(torch.zeros(8))
    group.wait(5.0)
    sender.leave(group.name)
    assert sender._process_group is None
    assert NcclDouble.made[-1].calls == ["abort"]


@pytest.fixture(scope="module")
def two_ranks(ray_session: None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    made = make_trainer(tiny_model, tmp_path_factory.mktemp("two_ranks"), ranks=2)
    asyncio.run(started(made, weights=False))
    asyncio.run(made.attach("doubles", Doubles))
    with killed(*made.ranks):
        yield made


@pytest.mark.parametrize(
    ("backend", "bucket"),
    [("nccl_double", 0), ("unreceived_double", 1)],
    ids=["rank 0 builds the communicator", "rank 0 waits for its last broadcast"],
)
async def test_an_engine_that_refuses_a_bucket_leaves_no_rank_behind(
    backend: str, bucket: int, two_ranks: Any, tmp_path: Path
) -> None:
    """The sync fails at once, the ranks answer again at once, and the next sync is complete."""
    settings: dict[str, Any] = {"bucket_mib": 0.05, "verify": Verify.never, "timeout_s": TIMEOUT_S}
    refusing = EngineDouble(refuses=("update_weights_from_distributed", bucket))
    failing = await make_synchronizer("collective", two_ranks, [refusing], tmp_path, backend=backend, **settings)
    began = time.monotonic()
    with pytest.raises(SyncError, match=f"bucket {bucket} of 9: engine 0: refused by the test"):
        await failing.sync(1)
    assert time.monotonic() - began < 2 * SOON_S
    assert await asyncio.wait_for(two_ranks.version(), SOON_S) == 0
    assert "resume" not in refusing.requests

    engine = EngineDouble()
    whole = await make_synchronizer("collective", two_ranks, [engine], tmp_path, backend="prompt_double", **settings)
    assert (await whole.sync(2)).buckets == 9
    # the session and its buckets: the weights of a draft stay as they are
    assert [each["selector"] for each in engine.bodies if "selector" in each] == ["target"] * (1 + 9)
