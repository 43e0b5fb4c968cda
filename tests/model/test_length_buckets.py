"""Buckets of sequences of similar length."""

import random

from app.model.packing import FILLED, length_buckets


def test_buckets_hold_every_sequence_once_beside_others_of_similar_length() -> None:
    assert length_buckets([10, 100, 9, 90]) == [[1, 3], [0, 2]]
    draw = random.Random(1)
    lengths = [draw.randrange(1, 500) for _ in range(64)]
    buckets = length_buckets(lengths)
    assert len(buckets) > 1
    assert sorted(index for bucket in buckets for index in bucket) == list(range(64))
    assert all(min(lengths[i] for i in bucket) >= FILLED * lengths[bucket[0]] for bucket in buckets)
    assert FILLED == 0.75
