"""A delta, packed by trainer ranks and loaded by the engine's plugin, equals a full sync bit for bit."""

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from app.rollout.engine.sglang_plugin import delta_loader as wire
from app.rollout.engine.sglang_plugin.delta_loader import DeltaLoader
from app.rollout.engine.sglang_plugin.delta_loader import positions as decoded_positions
from app.rollout.engine.sglang_plugin.sparse_tensor import SparseTensor
from app.weight_sync import shard_diff
from app.weight_sync.buckets import Bucket, Receivers, TensorMeta, plan_buckets
from app.weight_sync.delta import DeltaEncoder, encode_gaps, max_header_bytes
from app.weight_sync.shard_diff import CPU_CHUNK, ShardSnapshot, diff_and_replace_all
from tests.trainer.ranks import run_on

ROWS, ROW = 6, 10
SHAPES = {"up": (ROWS, ROW), "gate": (ROWS, ROW), "down": (ROW, ROWS), "odd": (7,), "big": (301, 257), "decay": (3,)}
KEPT_FLOAT32 = ("decay",)
METAS = [TensorMeta(name, "float32" if name in KEPT_FLOAT32 else "bfloat16", shape) for name, shape in SHAPES.items()]


class Model:
    """The parameters of one tensor-parallel rank of an engine, loaded the way SGLang's loaders do."""

    def __init__(self, rank: int = 0, width: int = 1) -> None:
        self.rank, self.width = rank, width
        rows, columns = ROWS // width, ROW // width
        dtype = torch.bfloat16
        self.fused = torch.zeros(2 * rows, ROW, dtype=dtype)  # up over gate, rows of this rank
        self.down = torch.zeros(columns, ROWS, dtype=dtype).t().contiguous().t()  # any strides
        self.columns = torch.zeros(ROWS, columns, dtype=dtype)  # row-parallel: columns of this rank
        self.whole = {name: torch.zeros(SHAPES[name], dtype=dtype) for name in ("odd", "big")}
        self.decay = torch.zeros(3)

    def load_weights(self, named: Any) -> None:
        for name, tensor in named:
            if name in ("up", "gate"):
                rows = self.fused.shape[0] // 2
                target = self.fused.narrow(0, rows * (name == "gate"), rows)
                target.copy_(tensor.narrow(0, self.rank * rows, rows))
            if name == "up":
                columns = self.columns.shape[1]
                self.columns.copy_(tensor.narrow(1, self.rank * columns, columns))
            if name == "down":
                rows = self.down.shape[0]
                self.down.copy_(tensor[self.rank * rows :][:rows])
            if name in self.whole:
                self.whole[name].data.copy_(tensor)
            if name == "decay":
                self.decay.copy_(tensor)

    def state(self) -> list[Tensor]:
        return [self.fused, self.columns, self.down, *self.whole.values(), self.decay]


class Engine:
    """An engine: a loader and a model for each rank, each in a thread, with an all-reduce of their counts."""

    def __init__(self, width: int = 1) -> None:
        self.width = width
        self.counts: list[list[int]] = []
        self.barrier = threading.Barrier(width, action=self.sum_counts)
        self.loaders = [DeltaLoader() for _ in range(width)]
        for loader in self.loaders:
            loader._sum_over_ranks = self.all_reduce
        self.models = [Model(rank, width) for rank in range(width)]

    def sum_counts(self) -> None:
        self.sum = [sum(each) for each in zip(*self.counts, strict=True)]
        self.counts = []

    def all_reduce(self, counts: list[int]) -> list[int]:
        self.counts.append(counts)
        self.barrier.wait(30)
        return self.sum

    def take(self, message: Any) -> list[tuple[bool, str]]:
        """Return the replies of all ranks."""
        with ThreadPoolExecutor(self.width) as pool:
            return list(pool.map(lambda rank: self.loaders[rank].load(self.models[rank], message), range(self.width)))

    def take_all(self, messages: Any) -> None:
        for message in messages:
            replies = self.take(message)
            assert all(ok for ok, _ in replies), replies


class Trainer:
    """Master weights, their delta encoder, and the messages of each sync."""

    def __init__(self, capacity: int = 10**9) -> None:
        torch.manual_seed(0)
        self.masters = {name: torch.randn(shape) * 0.02 for name, shape in SHAPES.items()}
        self.buckets = plan_buckets(METAS, capacity=capacity)
        self.encoder = DeltaEncoder(self.masters, "bfloat16", on_host=False)
        self.changed = 0

    def sync(self, version: int, base: int | None) -> list[list[tuple[str, Tensor]]]:
        self.encoder.begin(version, base, len(self.buckets))
        return [self.message(index, bucket) for index, bucket in enumerate(self.buckets)]

    def message(self, index: int, bucket: Bucket) -> list[tuple[str, Tensor]]:
        buffer = torch.zeros(bucket.bytes + max_header_bytes(bucket), dtype=torch.uint8)
        packed = self.encoder.pack(index, bucket, buffer, receivers=Receivers.every_rank)
        self.changed = packed.changed or 0
        self.bytes = packed.bucket.bytes
        assert self.bytes <= len(buffer)
        tensors = zip(packed.bucket.tensors, packed.bucket.offsets, strict=True)
        return [
            (meta.name, buffer[at : at + meta.bytes].view(getattr(torch, meta.dtype)).reshape(meta.shape).clone())
            for meta, at in tensors
        ]

    def expected(self, **shape: int) -> list[Tensor]:
        model = Model(**shape)
        model.load_weights(
            (name, tensor if name in KEPT_FLOAT32 else tensor.bfloat16()) for name, tensor in self.masters.items()
        )
        return model.state()


def same_bits(actual: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(bits(one), bits(other)) for one, other in zip(actual, expected, strict=True))


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


CHANGES = {
    "nothing": lambda name, tensor: tensor,
    "a few": lambda name, tensor: torch.where(torch.rand_like(tensor) < 0.02, tensor * 1.1, tensor),
    "all of one": lambda name, tensor: tensor * 2 if name == "big" else tensor,
    "first and last rows": lambda name, tensor: tensor.index_fill(0, torch.tensor([0, len(tensor) - 1]), 1.0),
    "signs of zero": lambda name, tensor: torch.zeros_like(tensor).copysign_(torch.randn_like(tensor)),
    "not a number": lambda name, tensor: torch.where(torch.rand_like(tensor) < 0.02, torch.nan, tensor),
}


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_a_delta_loads_what_a_full_sync_would(change: str, width: int) -> None:
    """Fused rows, columns of a row-parallel parameter, odd sizes, float32 beside bfloat16, over three syncs."""
    trainer, engine = Trainer(capacity=500), Engine(width)
    for version, base in ((5, None), (6, 5), (7, 6)):
        if base is not None:
            for name, tensor in trainer.masters.items():
                tensor.copy_(CHANGES[change](name, tensor))
        engine.take_all(trainer.sync(version, base))
        for rank, (loader, model) in enumerate(zip(engine.loaders, engine.models, strict=True)):
            assert loader.synced_version == version
            assert same_bits(model.state(), trainer.expected(rank=rank, width=width))


def test_only_what_changed_is_sent_and_no_message_is_larger_than_its_bucket() -> None:
    trainer = Trainer()
    full = sum(bucket.bytes for bucket in trainer.buckets)
    trainer.sync(0, None)
    assert full <= trainer.bytes <= full + 200
    trainer.sync(1, 0)
    assert trainer.changed == 0
    assert trainer.bytes < 100
    trainer.masters["big"][100, 200] *= 2
    ((message),) = trainer.sync(2, 1)
    assert trainer.changed == 1
    gaps, values = dict(message)[wire.GAPS], dict(message)[wire.VALUES]
    position = 100 * 257 + 200
    assert gaps.tolist() == [wire.MORE] * (position // wire.MORE) + [position % wire.MORE]
    assert torch.equal(values, trainer.masters["big"][100, 200].bfloat16().reshape(1))
    for tensor in trainer.masters.values():
        tensor.neg_()
    trainer.sync(3, 2)
    assert trainer.bytes <= full + 200  # entries would take twice as much


GAPS = [  # positions of each tensor, bytes of each
    ([[0]], [[0]]),
    ([[254, 255], [255]], [[254, 0], [255, 0]]),
    ([[0, 1, 257, 512, 1023], [3]], [[0, 0, 255, 0, 254, 255, 255, 0], [3]]),
    ([[1000], [2, 4], [600, 601]], [[255, 255, 255, 235], [2, 1], [255, 255, 90, 0]]),
]


@pytest.mark.parametrize(("positions", "encoded"), GAPS)
def test_gaps_are_bytes_and_every_tensor_begins_anew(positions: list[list[int]], encoded: list[list[int]]) -> None:
    flat, sizes = encode_gaps([torch.tensor(each, dtype=torch.int32) for each in positions])
    assert [each.tolist() for each in flat.split(sizes)] == encoded
    assert [decoded_positions(each).tolist() for each in flat.split(sizes)] == positions


@pytest.mark.parametrize(
    ("order", "refusal"),
    [
        ([1], "message 1 of policy 6 is out of order"),  # the first one was lost
        ([0, 0], "message 0 of policy 6 holds changes of policy 5, but this engine holds no full sync"),
        ([0, 1, 1], "message 1 of policy 6 is out of order"),
        ([0, 2], "message 2 of policy 6 is out of order"),
    ],
)
def test_a_lost_repeated_or_reordered_message_is_refused(order: list[int], refusal: str) -> None:
    trainer, engine = Trainer(capacity=500), Engine()
    engine.take_all(trainer.sync(5, None))
    messages = trainer.sync(6, 5)
    assert len(messages) >= 3
    replies = [engine.take(messages[index])[0] for index in order]
    assert not replies[-1][0]
    assert refusal in replies[-1][1]
    assert engine.loaders[0].synced_version is None
    assert not engine.take(messages[0])[0][0]  # only a full sync is accepted now
    engine.take_all(trainer.sync(7, None))
    assert same_bits(engine.models[0].state(), trainer.expected())


def test_a_lost_sync_is_noticed_by_its_version() -> None:
    trainer, engine = Trainer(), Engine()
    engine.take_all(trainer.sync(5, None))
    trainer.sync(6, 5)
    ok, reply = engine.take(trainer.sync(7, 6)[0])[0]
    assert (ok, reply) == (False, "message 0 of policy 7 holds changes of policy 6, but this engine holds policy 5")


def test_after_a_sync_without_headers_a_delta_is_refused() -> None:
    trainer, engine = Trainer(), Engine()
    engine.take_all(trainer.sync(5, None))
    loader, plain = engine.loaders[0], [("up", torch.zeros(6, 10))]
    assert loader.from_collective(lambda updater, named: (True, "loaded"), None, plain) == (True, "loaded")
    ok, reply = engine.take(trainer.sync(6, 5)[0])[0]
    assert not ok
    assert "holds no full sync" in reply


def test_entries_that_no_parameter_takes_fail_the_sync_on_all_ranks() -> None:
    trainer, engine = Trainer(), Engine(2)
    engine.take_all(trainer.sync(5, None))
    trainer.masters["big"][3, 3] *= 2
    (message,) = trainer.sync(6, 5)
    for model in engine.models:
        del model.whole["big"]  # as if its loader skipped an unknown name
    replies = engine.take(message)
    assert replies == [(False, "message 0 of policy 6 was not loaded: big: 0 of 1 entries were written")] * 2


def test_an_error_on_one_rank_fails_the_message_on_all_ranks() -> None:
    trainer, engine = Trainer(), Engine(2)
    engine.take_all(trainer.sync(5, None))
    trainer.masters["big"][3, 3] *= 2
    (message,) = trainer.sync(6, 5)
    engine.models[1].whole["big"] = torch.zeros(2, 2)
    (first_ok, first), (second_ok, second) = engine.take(message)
    assert (first_ok, second_ok) == (False, False)
    assert first.endswith("another rank of this engine failed")
    assert "the loader copies (301, 257) into (2, 2)" in second


def test_a_loader_that_computes_with_a_delta_is_refused() -> None:
    tensor = SparseTensor(torch.empty(4, 4, device="meta"), torch.tensor([3]), torch.ones(1), [])
    with pytest.raises(RuntimeError, match=r"the model's loader computes aten.add"):
        tensor + 1
    with pytest.raises(RuntimeError, match="repeats a tensor"):
        torch.zeros(2, 4, 4).copy_(tensor.unsqueeze(0).expand(2, 4, 4))


@pytest.mark.parametrize("items", [1, 3, 4, 1000, CPU_CHUNK, CPU_CHUNK + 1, 2 * CPU_CHUNK + 7])
def test_changes_are_those_of_a_plain_comparison(items: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_diff, "CPU_PART", CPU_CHUNK)  # the largest shard is compared by three threads
    generator = np.random.default_rng(items)
    shard = torch.from_numpy(generator.standard_normal(items).astype(np.float32))
    snapshot = ShardSnapshot(shard, torch.bfloat16, on_host=False)
    snapshot.replace(shard)
    for fraction in (0.0, 0.01, 1.0):
        before = shard.bfloat16().view(torch.int16).numpy().copy()
        shard.add_(
            torch.from_numpy(generator.standard_normal(items).astype(np.float32) * (generator.random(items) < fraction))
        )
        after = shard.bfloat16().view(torch.int16).numpy()
        ((position, value),) = diff_and_replace_all([snapshot], [shard])
        expected = [at for at in range(items) if before[at] != after[at]]
        assert position.tolist() == expected
        assert value.tolist() == after[expected].tolist()
    assert snapshot.diff_and_replace(shard)[0].numel() == 0


ROUNDS = 3


def test_two_ranks_encode_the_same_message_as_one(tmp_path: Path) -> None:
    """Shards of even, odd and fewer rows than ranks, received by rank 0 alone and by all ranks."""
    saved = run_on(2, on_both_ranks, tmp_path / "messages.pt")
    alone = messages_of(Receivers.every_rank)
    assert len(alone) == ROUNDS
    received = [saved[0][receivers.name] for receivers in Receivers]
    for messages in (*received, saved[1]["every_rank"]):
        assert all(
            one is not None and other is not None and torch.equal(one, other)
            for one, other in zip(messages, alone, strict=True)
        )
    assert saved[1]["rank_0"] == saved[1]["rank_0_by_all_gather"] == [None] * ROUNDS


SHARDED = {"even": (8, 33), "odd": (7, 5), "one row": (1, 40), "vector": (301,), "blocks": (300, 701)}


def on_both_ranks(mesh: DeviceMesh) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # deprecated collectives
        messages = {each.name: messages_of(each, mesh) for each in (Receivers.every_rank, Receivers.rank_0)}
        setattr(dist, "gather", gather_of_torch_npu)  # noqa: B010 (of another signature)
        messages["rank_0_by_all_gather"] = messages_of(Receivers.rank_0_by_all_gather, mesh)
    saved: list[Any] = [None, None]
    dist.all_gather_object(saved, messages)
    return saved


def gather_of_torch_npu(
    tensor: Any, gather_list: Any = None, dst: int = 0, group: Any = None, async_op: bool = False
) -> None:
    """The signature of torch_npu's replacement, which all-gathers objects and tensors on every call."""
    raise AssertionError("HCCL has no gather")


def messages_of(receivers: Receivers, mesh: DeviceMesh | None = None) -> list[Tensor | None]:
    """Return the messages of this rank, one for each sync, in one bucket; of shards over the mesh if there is one."""
    generator = torch.Generator().manual_seed(3)
    whole = {name: 0.02 * torch.randn(shape, generator=generator) for name, shape in SHARDED.items()}
    tensors: dict[str, Tensor] = dict(whole)
    if mesh is not None:
        tensors = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}
    bucket = Bucket(tuple(TensorMeta(name, "bfloat16", shape) for name, shape in SHARDED.items()))
    encoder = DeltaEncoder(tensors, "bfloat16", on_host=False)
    receives = receivers is Receivers.every_rank or mesh is None or dist.get_rank() == 0
    sent: list[Tensor | None] = []
    for version in range(ROUNDS):
        encoder.begin(version, version - 1 if version else None, 1)
        buffer = torch.zeros(bucket.bytes + max_header_bytes(bucket), dtype=torch.uint8) if receives else None
        packed = encoder.pack(0, bucket, buffer, receivers=receivers)
        sent.append(buffer[: packed.bucket.bytes] if buffer is not None else None)
        for name, tensor in tensors.items():
            noise = torch.randn(SHARDED[name], generator=generator)
            change = noise * (torch.rand(SHARDED[name], generator=generator) < 0.1)
            if isinstance(tensor, DTensor):
                change = distribute_tensor(change, tensor.device_mesh, [Shard(0)])
            tensor.add_(change)
    return sent
