"""Padding and unpadding are inverses, and each is the gradient of the other."""

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.model.packing import FILLED, Packing


def packing(lengths: list[int]) -> Packing:
    return Packing.of([0, *accumulate(lengths)])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_every_token_is_restored_and_padding_is_on_the_right(lengths: list[int]) -> None:
    layout = packing(lengths)
    tokens = torch.arange(sum(lengths), dtype=torch.float64)[:, None]
    rows = [row for bucket in layout.pad(tokens) for row in bucket[:, :, 0].tolist()]
    starts = {sum(lengths[:sequence]): length for sequence, length in enumerate(lengths)}
    assert sorted(row[0] for row in rows) == sorted(starts)
    for row in rows:
        length = starts[row[0]]
        assert row == [row[0] + min(column, length - 1) for column in range(len(row))]
        assert length >= FILLED * len(row)
    assert torch.equal(layout.unpad(layout.pad(tokens)), tokens)


def test_gradients_equal_those_of_torch_indexing_without_padding() -> None:
    layout = packing([3, 1, 7, 6])
    x = torch.randn(17, 2, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(17, 2, dtype=torch.float64)
    layout.unpad([bucket.sin() for bucket in layout.pad(x)]).mul(weights).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, x.detach().cos() * weights, rtol=1e-12, atol=1e-12)


def test_values_at_padding_have_no_effect() -> None:
    layout = packing([4, 3])
    x = torch.ones(7, 1, requires_grad=True)
    (bucket,) = layout.pad(x)
    poisoned = bucket.masked_fill(~layout.buckets.taken.view(2, 4, 1), torch.nan)
    layout.unpad([poisoned]).sum().backward()
    assert x.grad is not None
    assert x.grad.flatten().tolist() == [1.0] * 7


GROUPS = st.lists(
    st.tuples(st.integers(0, 9), st.lists(st.integers(1, 9), min_size=1, max_size=5)), min_size=1, max_size=4
)


@settings(max_examples=50, deadline=None)
@given(GROUPS, st.sampled_from([torch.float64, torch.bfloat16]))
def test_shared_tokens_are_written_out_and_their_gradients_add_up(
    groups: list[tuple[int, list[int]]], dtype: torch.dtype
) -> None:
    """Of groups of sequences with a lead in common: against torch's own indexing."""
    tokens: list[int] = []
    lengths = []
    packed_tokens = 0
    for lead, tails in groups:
        shared = list(range(packed_tokens, packed_tokens + lead))
        packed_tokens += lead
        for tail in tails:
            tokens += [*shared, *range(packed_tokens, packed_tokens + tail)]
            lengths.append(lead + tail)
            packed_tokens += tail
    index = torch.tensor(tokens)
    layout = Packing.of([0, *accumulate(lengths)], tokens=index.numpy())

    x = torch.randn(packed_tokens, 2, dtype=dtype)
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    weights = torch.randn(len(tokens), 2, dtype=dtype)
    written = layout.write_out(ours)
    assert torch.equal(written, x[index])
    (written * weights).sum().backward()
    (theirs.double()[index] * weights).sum().backward()
    rtol = 1e-12 if dtype is torch.float64 else 2**-7  # one rounding of a bfloat16
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=rtol, atol=1e-12)

    assert sum(map(len, layout.pad(x))) == len(lengths)
    assert torch.equal(layout.unpad(layout.pad(x)), x)
    assert torch.equal(layout.take_back(layout.write_out(x)), x)


@pytest.mark.parametrize("boundaries", [[0], [0, 3, 3], [1, 4]])
def test_invalid_boundaries_are_rejected(boundaries: list[int]) -> None:
    with pytest.raises(ValueError, match="boundaries must rise from 0"):
        Packing.of(boundaries)


def test_the_chunks_of_every_sequence_are_listed_once_they_are_needed() -> None:
    layout = packing([64, 65, 1, 200])
    assert "chunk_indices" not in vars(layout)
    chunks = layout.chunk_indices
    assert chunks.tolist() == [[0, 0], [1, 0], [1, 1], [2, 0], [3, 0], [3, 1], [3, 2], [3, 3]]
    assert chunks.dtype == layout.cu_seqlens.dtype
    assert layout.chunk_indices is chunks
