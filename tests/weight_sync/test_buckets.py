"""The bucket plan holds every tensor once, in order, within capacity, aligned."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.weight_sync.buckets import ITEM_BYTES, TensorMeta, plan_buckets

SHAPES = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple)
TENSORS = st.lists(st.tuples(st.sampled_from(sorted(ITEM_BYTES)), SHAPES), min_size=1, max_size=30).map(
    lambda pairs: [TensorMeta(f"tensor.{i}", dtype, shape) for i, (dtype, shape) in enumerate(pairs)]
)


@given(TENSORS, st.integers(1, 50_000))
def test_every_tensor_is_in_one_bucket_whole_in_model_order(tensors: list[TensorMeta], capacity: int) -> None:
    buckets = plan_buckets(tensors, capacity=capacity)
    assert [tensor for bucket in buckets for tensor in bucket.tensors] == tensors
    for bucket in buckets:
        assert bucket.bytes <= max(capacity, bucket.tensors[0].bytes)
        for tensor, offset in zip(bucket.tensors, bucket.offsets, strict=True):
            assert offset % ITEM_BYTES[tensor.dtype] == 0
        assert bucket.offsets[-1] + bucket.tensors[-1].bytes == bucket.bytes  # no gaps: only used bytes are sent


@pytest.mark.parametrize(("capacity", "sizes"), [(1, [400, 800, 40]), (1200, [400, 840]), (10**9, [1240])])
def test_a_tensor_larger_than_a_bucket_is_a_bucket_of_its_own(capacity: int, sizes: list[int]) -> None:
    tensors = [
        TensorMeta("a", "float32", (10, 10)),
        TensorMeta("b", "bfloat16", (20, 20)),
        TensorMeta("c", "bfloat16", (20,)),
    ]
    assert [bucket.bytes for bucket in plan_buckets(tensors, capacity=capacity)] == sizes


@given(TENSORS, st.integers(1, 50_000))
def test_no_smaller_capacity_does_with_as_many_buckets(tensors: list[TensorMeta], capacity: int) -> None:
    buckets = plan_buckets(tensors, capacity=capacity)
    largest = max(bucket.bytes for bucket in buckets)
    smaller = plan_buckets(tensors, capacity=max(1, largest - 1))
    assert len(smaller) > len(buckets) or max(bucket.bytes for bucket in smaller) == largest
