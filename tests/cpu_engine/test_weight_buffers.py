"""What an engine on a CPU keeps between weight syncs."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from app.cpu_engine import weight_buffers
from app.cpu_engine.weight_buffers import SENDER_BUFFERS, WeightBuffers
from app.utils.process import SHARED_MEMORY
from app.weight_sync.sender import BUFFERS
from app.weight_sync.transport.ipc_payload import allocate_shared, shared_memory_name

CPU = torch.device("cpu")


def mapped(buffers: WeightBuffers, flat: Tensor) -> Tensor:
    _, options = buffers.keep_mapping(None, {"flattened_tensor": flat, "metadata": []}, load_format="flattened_bucket")
    kept: Tensor = options["named_tensors"]["flattened_tensor"]
    return kept


def shared_bytes(size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return allocate_shared(size, CPU).random_(0, 256, generator=generator)


def test_as_many_mappings_are_kept_as_a_sender_has_buffers() -> None:
    assert SENDER_BUFFERS == BUFFERS


def test_a_bucket_is_read_from_one_mapping_in_every_sync() -> None:
    buffers = WeightBuffers()
    ours = [shared_bytes(10_000, seed) for seed in range(2)]
    first = [mapped(buffers, flat[:7000]) for flat in ours]
    assert [torch.equal(kept, flat[:7000]) for kept, flat in zip(first, ours, strict=True)] == [True, True]
    ours[1].fill_(7)
    again = [mapped(buffers, flat[10:9001]) for flat in ours]
    assert [torch.equal(kept, flat[10:9001]) for kept, flat in zip(again, ours, strict=True)] == [True, True]
    assert [kept.data_ptr() - 10 for kept in again] == [kept.data_ptr() for kept in first]


def test_mappings_of_older_buffers_and_of_removed_files_are_dropped() -> None:
    buffers = WeightBuffers()
    ours = [shared_bytes(1000, seed) for seed in range(3)]
    names = [shared_memory_name(flat) for flat in ours]
    for flat in ours:
        mapped(buffers, flat)
    assert [name for name, _ in buffers._mapped] == names[1:]
    del ours[1], flat
    assert not (SHARED_MEMORY / names[1]).exists()
    mapped(buffers, ours[1])
    assert [name for name, _ in buffers._mapped] == names[2:]


def test_other_formats_are_left_alone() -> None:
    tensors = [("weight", torch.zeros(2))]
    assert WeightBuffers().keep_mapping("updater", tensors, None) == (
        ("updater",),
        {"named_tensors": tensors, "load_format": None},
    )


def test_buckets_are_received_into_one_buffer_that_grows_and_is_given_up_after_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[Tensor | RuntimeError] = []

    def broadcast(target: Tensor, *, src: int, group: Any) -> None:
        assert (src, group) == (0, "the group")
        message = sent.pop(0)
        if isinstance(message, RuntimeError):
            raise message
        target.copy_(message)

    monkeypatch.setattr(weight_buffers, "dist", SimpleNamespace(broadcast=broadcast))
    buffers = WeightBuffers()
    updater = SimpleNamespace(_model_update_group={"weights": "the group"})

    def receive(*values: Tensor) -> list[Tensor]:
        sent.append(torch.cat([each.reshape(-1).view(torch.uint8) for each in values]))
        named = buffers.receive(
            updater,
            names=[f"tensor.{index}" for index in range(len(values))],
            dtypes=[str(each.dtype).removeprefix("torch.") for each in values],
            shapes=[list(each.shape) for each in values],
            group_name="weights",
        )
        assert [name for name, _ in named] == [f"tensor.{index}" for index in range(len(values))]
        return [tensor for _, tensor in named]

    large = [torch.randn(3, 4), torch.randn(5).bfloat16(), torch.arange(7, dtype=torch.uint8)]
    received = receive(*large)
    assert [torch.equal(one, other) for one, other in zip(received, large, strict=True)] == [True, True, True]
    (small,) = receive(torch.ones(2))
    assert small.tolist() == [1.0, 1.0]
    assert small.data_ptr() == received[0].data_ptr()
    (larger,) = receive(torch.ones(1000))
    assert larger.sum() == 1000
    assert buffers._received is not None
    assert buffers._received.numel() == 4000

    sent.append(RuntimeError("aborted"))
    with pytest.raises(RuntimeError, match="aborted"):
        receive(torch.ones(2))
    assert buffers._received is None
