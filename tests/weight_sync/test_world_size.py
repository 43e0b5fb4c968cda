"""Building, sharding and gathering a weight sync at the rank counts of real runs, without devices.

The model and the sender are the application's, at full size, on fake tensors: torch checks every shape and computes
nothing. A fake process group makes this process one of 1 to 16 ranks.

torch's LocalTensorMode, which would compute the numbers of all ranks in one process, does not carry FSDP2 (torch 2.13):
every rank gets the shard of rank 0, and resharding resizes a storage that its tensors do not have.
"""

from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from app.config.device import DeviceKind
from app.config.model import LoraConfig
from app.model.architecture import QWEN3_4B, QWEN35_9B, adapter_parameters
from app.model.sharding import own_rows
from app.utils.units import MIB
from app.weight_sync.adapters import AdapterSender
from app.weight_sync.buckets import Bucket, TensorMeta, plan_buckets
from app.weight_sync.sender import Sender
from tests.standin.fake_memory import Case, build, fake_ranks
from tests.weight_sync.support import rank_of

MODELS = {"qwen3_4b": QWEN3_4B, "qwen35_9b": QWEN35_9B}
LAYERS = 4  # one layer of each kind, the others have the same shapes
UNEVEN = 6  # ranks, which divide the rows of few tensors
CAPACITY = 512 * MIB  # less than on accelerators, for several buckets
RANKS = (1, UNEVEN, 16)
LORA = LoraConfig(rank=32)
FULL_LAYERS = {"qwen3_4b": LAYERS, "qwen35_9b": 1}  # of the first four


@dataclass(frozen=True)
class Rank:
    """What one rank has of the model, and what it sends."""

    tensors: list[TensorMeta]
    buckets: tuple[Bucket, ...]
    rows: dict[str, tuple[int, int]]
    buffers: list[int]  # bytes


@cache
def synced(name: str, ranks: int, rank: int, kind: DeviceKind, layers: int | None = LAYERS) -> Rank:
    """Build rank `rank` of `ranks`, and gather every bucket of a weight sync there."""
    with fake_ranks(ranks, rank, "cpu") as mesh, FakeTensorMode(allow_non_fake_inputs=True):
        model = build(Case(name, ranks, layers=layers), mesh, torch.device("cpu"))
        sender = Sender(rank_of(model, rank, kind))
        sender.prepare(plan_buckets(sender.describe(), capacity=CAPACITY), None, 1)
        sender.begin(1, None, [0])
        for index in range(len(sender.buckets)):
            sender.send_and_gather_next(index)

        rows = {}
        for tensor_name, tensor in sender.tensors.items():
            own = own_rows(tensor) if isinstance(tensor, DTensor) else slice(0, tensor.shape[0])
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            assert local.shape[0] == own.stop - own.start, tensor_name
            rows[tensor_name] = own.start, own.stop
        return Rank(sender.describe(), tuple(sender.buckets), rows, [len(buffer) for buffer in sender.buffers])


@pytest.mark.parametrize("kind", [DeviceKind.cuda, DeviceKind.npu])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", MODELS)
def test_ranks_share_out_every_tensor_and_gather_every_bucket(name: str, ranks: int, kind: DeviceKind) -> None:
    """NPUs all-gather where CUDA gathers on rank 0, and rows that do not divide take a third way."""
    first, last = synced(name, ranks, 0, kind), synced(name, ranks, ranks - 1, kind)
    assert first.tensors == last.tensors
    assert first.buckets == last.buckets
    for tensor in first.tensors:
        rows = tensor.shape[0]
        share = -(-rows // ranks)
        assert first.rows[tensor.name] == (0, min(share, rows)), tensor
        assert last.rows[tensor.name] == (min((ranks - 1) * share, rows), rows), tensor

    assert [len(last.buffers), len(first.buffers)] == [0 if ranks > 1 else 2, min(2, len(first.buckets))]
    assert set(first.buffers) == {max(bucket.bytes for bucket in first.buckets)}


@pytest.mark.parametrize("name", MODELS)
def test_the_buckets_of_a_whole_model_hold_all_its_parameters(name: str) -> None:
    model = MODELS[name]
    rank = synced(name, 8, 0, DeviceKind.cuda, None)
    assert sum(tensor.bytes // tensor.item_bytes for tensor in rank.tensors) == model.parameters
    assert [tensor for bucket in rank.buckets for tensor in bucket.tensors] == rank.tensors
    assert max(tensor.bytes for tensor in rank.tensors) == 2 * model.largest_tensor


@pytest.mark.parametrize("kind", [DeviceKind.cuda, DeviceKind.npu])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", MODELS)
def test_rank_0_gathers_every_adapter_whole(name: str, ranks: int, kind: DeviceKind) -> None:
    served: list[dict[str, tuple[int, ...]]] = []
    for rank in (0, ranks - 1):
        with fake_ranks(ranks, rank, "cpu") as mesh, FakeTensorMode(allow_non_fake_inputs=True):
            model = build(Case(name, ranks, layers=LAYERS, rank=LORA.rank), mesh, torch.device("cpu"))
            sender = AdapterSender(rank_of(model, rank, kind, lora=LORA))
            trained = sum(tensor.numel() for tensor in sender.tensors.values())
            served.append({key: tuple(part.shape) for each in sender.tensors for key, part in sender._gather(each)})

    architecture = replace(MODELS[name], layers=LAYERS, full_layers=FULL_LAYERS[name])
    assert trained == adapter_parameters(architecture, LORA)
    assert all(LORA.rank in shape for shape in served[0].values())
    assert len(served[0]) >= len(sender.tensors)
    assert ranks == 1 or served[1] == {}
