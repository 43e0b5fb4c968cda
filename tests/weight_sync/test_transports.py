"""Components of a weight sync that need no server."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from app.config.device import DeviceKind
from app.config.weight_sync import TransportKind, WeightSyncConfig, transport_of
from app.errors import EngineError, SyncError
from app.trainer.profiler import StepProfiler
from app.weight_sync.buckets import Bucket, ReadyBucket, TensorMeta
from app.weight_sync.sender import Sender
from app.weight_sync.transport import ipc_payload
from app.weight_sync.transport.base import Deadline
from app.weight_sync.transport.collective import BroadcastSender
from app.weight_sync.transport.ipc import IpcSender
from tests.refusals import refused
from tests.weight_sync.support import rank_of

AUTO, IPC, COLLECTIVE = TransportKind.auto, TransportKind.ipc, TransportKind.collective


@pytest.mark.parametrize("device", list(DeviceKind))
def test_a_transport_follows_the_devices_and_is_refused_where_it_cannot_work(device: DeviceKind) -> None:
    def chosen(kind: TransportKind, *, shared: bool) -> TransportKind:
        return transport_of(WeightSyncConfig(transport=kind), shared_devices=shared, device=device)

    assert [chosen(AUTO, shared=True), chosen(AUTO, shared=False)] == [IPC, COLLECTIVE]
    assert chosen(COLLECTIVE, shared=False) is COLLECTIVE
    with refused("weight_sync.transport", "ipc", "auto or collective"):
        chosen(IPC, shared=False)
    if device is DeviceKind.cpu:
        assert chosen(COLLECTIVE, shared=True) is COLLECTIVE
        return
    with refused("weight_sync.transport", "collective", "auto or ipc"):
        chosen(COLLECTIVE, shared=True)


@pytest.mark.parametrize(("engines", "ranks"), [([0], {0, 1}), ([1], {2, 3}), ([0, 1], {0, 1, 2, 3})])
def test_only_ranks_whose_handle_an_engine_opens_make_one(
    engines: list[int], ranks: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handle that nobody opens keeps its memory on the device, and engines that are restarted are synced alone."""
    monkeypatch.setattr(ipc_payload, "serialize_bucket", lambda buffer, bucket: "handle")
    made = set()
    for rank in range(4):
        sender = IpcSender.__new__(IpcSender)
        vars(sender).update(rank_index=rank, tensor_parallel=2, engines=engines, buffers=[None])
        sender.ready = {0: ReadyBucket(Bucket(()))}
        if sender.ipc_handle(0) is not None:
            made.add(rank)
    assert made == ranks


@pytest.mark.parametrize("kind", [IpcSender, BroadcastSender])
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_buffers_on_a_device_are_freed_after_each_sync_and_those_of_a_cpu_are_kept(
    kind: type[Sender], device: str
) -> None:
    """Training needs the memory; and each handle wraps the buffer's storage once more."""

    class QuietSender(kind):  # type: ignore[misc, valid-type]
        def _gather(self, index: int) -> ReadyBucket:
            return ReadyBucket(self.buckets[index])

        def send(self, index: int) -> None: ...

    rank = rank_of(SimpleNamespace(causal_lm=torch.nn.Module(), checkpoint_names={}), kind=DeviceKind.cuda)
    rank.torch_device, rank.profiler = torch.device(device), StepProfiler([], Path(), 0)
    sender = QuietSender(rank)
    bucket = Bucket((TensorMeta("weight", "bfloat16", (8,)),))
    sender.prepare([bucket, bucket, bucket], None, 1)
    for version in range(3):
        kept = [id(buffer) for buffer in sender.buffers]
        assert len(kept) == (2 if device == "cpu" else 0)

        ready, index = sender.begin(version, None, [0]), 0
        assert [buffer.numel() for buffer in sender.buffers] == [16, 16]
        during = [id(buffer) for buffer in sender.buffers]
        while ready is not None:
            ready, index = sender.send_and_gather_next(index), index + 1
        assert device != "cpu" or kept == during
        sender.finish(1.0)
    sender.close()


async def test_the_first_failure_ends_the_wait_and_later_ones_are_named_too() -> None:
    async def failing(seconds: float, error: str) -> None:
        await asyncio.sleep(seconds)
        raise EngineError(error)

    calls = {"one": asyncio.sleep(60), "two": failing(0, "connection closed"), "three": failing(0.1, "it was killed")}
    with pytest.raises(SyncError, match=r"bucket 3 of 9: two: .*three: "):
        await Deadline(5, 60).gather("bucket 3 of 9", calls)
