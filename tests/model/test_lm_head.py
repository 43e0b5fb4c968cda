"""The chunked LM head against full logits in float64."""

import math

import pytest
import torch
from torch import Tensor

from app.model.lm_head import token_logprobs

TOKENS, WIDTH, VOCABULARY, TEMPERATURE = 13, 6, 29, 1.7


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(VOCABULARY, (TOKENS,), generator=generator)


def test_logprobs_and_entropies_equal_a_loop_over_tokens() -> None:
    hidden, weight, targets = inputs()
    with torch.no_grad():
        logprobs, entropies = token_logprobs(hidden, weight, targets, TEMPERATURE, chunk_tokens=4)
    for token in range(TOKENS):
        scores = [float(hidden[token].detach() @ weight[word].detach()) / TEMPERATURE for word in range(VOCABULARY)]
        total = sum(math.exp(score) for score in scores)
        probabilities = [math.exp(score) / total for score in scores]
        assert float(logprobs[token]) == pytest.approx(math.log(probabilities[targets[token]]), abs=1e-12)
        assert float(entropies[token]) == pytest.approx(-sum(p * math.log(p) for p in probabilities), abs=1e-12)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 13, 100])
@pytest.mark.parametrize("terms", ["logprobs", "entropy", "both"])
def test_gradients_equal_those_of_full_logits(chunk_tokens: int, terms: str) -> None:
    generator = torch.Generator().manual_seed(1)
    grad_logprobs = torch.randn(TOKENS, generator=generator, dtype=torch.float64) * (terms != "entropy")
    grad_entropy = torch.randn(TOKENS, generator=generator, dtype=torch.float64) * (terms != "logprobs")

    hidden, weight, targets = inputs()
    logs = torch.log_softmax(hidden @ weight.T / TEMPERATURE, dim=1)
    entropies = -(logs.exp() * logs).sum(dim=1)
    (logs.gather(1, targets[:, None]).squeeze(1) @ grad_logprobs + entropies @ grad_entropy).backward()
    expected = hidden.grad, weight.grad

    hidden, weight, targets = inputs()
    with_entropy = terms != "logprobs"
    logprobs, entropies = token_logprobs(
        hidden, weight, targets, TEMPERATURE, entropy_gradient=with_entropy, chunk_tokens=chunk_tokens
    )
    loss = logprobs @ grad_logprobs if terms != "entropy" else entropies @ grad_entropy
    (loss + entropies @ grad_entropy if terms == "both" else loss).backward()
    for ours, theirs in zip((hidden.grad, weight.grad), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_entropy_is_a_metric_without_gradient_by_default() -> None:
    hidden, weight, targets = inputs()
    assert not token_logprobs(hidden, weight, targets, 1.0, chunk_tokens=4)[1].requires_grad


def test_a_bf16_head_sums_its_gradient_in_float32() -> None:
    """Many small contributions: summed in bf16 the gradient would stall at a fraction of its size."""
    tokens = 2048
    hidden = torch.ones(tokens, 1, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    logprobs, _ = token_logprobs(hidden, weight, torch.zeros(tokens, dtype=torch.int64), 1.0, chunk_tokens=1)
    logprobs.sum().backward()
    assert logprobs.dtype == torch.float32
    assert weight.grad is not None
    assert weight.grad.flatten().tolist() == [tokens / 2, -tokens / 2]


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, weight, targets = inputs()
    token_logprobs(hidden, weight.detach(), targets, 1.0, chunk_tokens=4)[0].sum().backward()
    assert hidden.grad is not None
