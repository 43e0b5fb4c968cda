"""Sampling on a CPU draws the tokens that their probabilities ask for, and leaves the rest to SGLang."""

from typing import Any

import pytest
import torch
from torch import Tensor

from app.rollout.engine.sglang_plugin.patches import BLOCK, sample, select


def original(*arguments: Any) -> Any:
    return "SGLang's"


@pytest.mark.parametrize("vocabulary", [1, 5, BLOCK, 3 * BLOCK + 7, 49152])
def test_a_share_selects_the_token_where_the_cumulative_probability_passes_it(vocabulary: int) -> None:
    torch.manual_seed(0)
    probs = torch.randn(50, vocabulary).mul(3).softmax(-1)
    uniform = torch.rand(50, 1, dtype=torch.float64)
    tokens = select(probs, uniform)
    assert tokens is not None

    exact = probs.double()
    above = exact.cumsum(-1).gather(1, tokens[:, None])
    below = above - exact.gather(1, tokens[:, None])
    share = uniform * exact.sum(-1, keepdim=True)
    assert (below - 1e-6 <= share).all()
    assert (share <= above + 1e-6).all()


def test_tokens_are_drawn_as_often_as_their_probability_says() -> None:
    torch.manual_seed(0)
    probs = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05]).repeat_interleave(40) / 40
    count = 20_000
    drawn = sample(original, probs.expand(count, -1)).long().bincount(minlength=len(probs)).double()

    expected = probs.double() * count
    possible = expected > 0
    assert drawn[~possible].sum() == 0
    # Pearson's statistic of 160 possible tokens: 159 on average, with a standard deviation of 18.
    assert ((drawn - expected)[possible].square() / expected[possible]).sum() < 159 + 5 * 18


@pytest.mark.parametrize("share", [0.0, 0.5, 1 - 2**-53, 1.0])
def test_a_token_of_probability_0_is_never_drawn(share: float) -> None:
    probs = torch.zeros(3, 4 * BLOCK)
    probs[0, 70] = 1.0
    probs[1, [3, 200]] = torch.tensor([1e-30, 0.1])
    probs[2, 100:120] = 1 / 20
    tokens = select(probs, torch.full((3, 1), share, dtype=torch.float64))
    assert tokens is not None
    assert (probs.gather(1, tokens[:, None]) > 0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -2.0])
def test_rows_that_are_no_probabilities_and_seeds_are_left_to_sglang(bad: float) -> None:
    probs: Tensor = torch.full((2, 100), 0.01)
    assert sample(original, probs, torch.tensor([1, 2]), torch.tensor([0, 0])) == "SGLang's"
    assert sample(original, probs.bfloat16()) == "SGLang's"
    probs[1, 7] = bad
    assert sample(original, probs) == "SGLang's"
