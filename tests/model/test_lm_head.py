"""The chunked LM head against full logits in float64."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from app.model.lm_head import adds_products, token_logprobs
from tests.bench.kernel_counts import KernelCounts

TOKENS, WIDTH, VOCABULARY, TEMPERATURE = 13, 6, 29, 1.7


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(VOCABULARY, (TOKENS,), generator=generator)


@pytest.mark.parametrize("chunk_vocabulary", [None, 1, 8, 29, 50])
def test_logprobs_and_entropies_equal_a_loop_over_tokens(chunk_vocabulary: int | None) -> None:
    hidden, weight, targets = inputs()
    with torch.no_grad():
        logprobs, entropies = token_logprobs(
            hidden, weight, targets, TEMPERATURE, chunk_tokens=4, chunk_vocabulary=chunk_vocabulary
        )
    for token in range(TOKENS):
        scores = [float(hidden[token].detach() @ weight[word].detach()) / TEMPERATURE for word in range(VOCABULARY)]
        total = sum(math.exp(score) for score in scores)
        probabilities = [math.exp(score) / total for score in scores]
        assert float(logprobs[token]) == pytest.approx(math.log(probabilities[targets[token]]), abs=1e-12)
        assert float(entropies[token]) == pytest.approx(-sum(p * math.log(p) for p in probabilities), abs=1e-12)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 13, 100])
@pytest.mark.parametrize("chunk_vocabulary", [None, 8])
@pytest.mark.parametrize("terms", ["logprobs", "entropy", "both"])
@pytest.mark.parametrize("compiling", [False, True])
def test_gradients_equal_those_of_full_logits(
    chunk_tokens: int, chunk_vocabulary: int | None, terms: str, compiling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of the way that is compiled, without the compiler."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
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
        hidden,
        weight,
        targets,
        TEMPERATURE,
        entropy_gradient=with_entropy,
        chunk_tokens=chunk_tokens,
        chunk_vocabulary=chunk_vocabulary,
    )
    loss = logprobs @ grad_logprobs if terms != "entropy" else entropies @ grad_entropy
    (loss + entropies @ grad_entropy if terms == "both" else loss).backward()
    for ours, theirs in zip((hidden.grad, weight.grad), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.fixture
def added() -> Iterator[list[int]]:
    """A double of CUDA's product that is added to a float32 sum. Yields the rows of each."""
    rows = []

    def addmm(total: Tensor, one: Tensor, two: Tensor, dtype: torch.dtype, *, beta: float = 1, out: Tensor) -> Tensor:
        assert out is total
        assert dtype == total.dtype == torch.float32
        rows.append(len(total))
        product = one.double() @ two.double()
        return out.copy_(product + beta * total if beta else product)

    adds_products.cache_clear()
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("addmm.dtype_out", addmm, "CPU")
        yield rows
    adds_products.cache_clear()


def test_a_bf16_head_adds_its_products_in_place_where_a_device_can(added: list[int]) -> None:
    """The sum over chunks is as exact as one product in float64, rounded once to bf16."""
    hidden, weight, targets = inputs(torch.bfloat16)
    logs = (hidden @ weight.T).double().log_softmax(dim=1)  # of the head's own products, in bf16
    of_logits = torch.nn.functional.one_hot(targets, VOCABULARY) - logs.exp()
    expected = of_logits.to(torch.bfloat16).double().T @ hidden.double()

    logprobs, _ = token_logprobs(hidden, weight, targets, 1.0, chunk_tokens=4)
    with KernelCounts() as counts:
        logprobs.sum().backward()
    assert added[-4:] == [VOCABULARY] * 4
    assert counts.names["mm"] == 4  # the logits of the chunks alone
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, expected.to(torch.bfloat16), rtol=2**-8, atol=1e-6)


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


def test_extreme_logits_in_one_part_of_the_vocabulary_stay_finite() -> None:
    """Logits of ±1000 in float32: `exp` of them overflows, and parts without a large logit contribute nothing."""
    weight = torch.tensor([[1000.0], [-1000.0], [999.0], [-1000.0], [-1000.0]])
    hidden = torch.ones(2, 1, requires_grad=True)
    logprobs, entropies = token_logprobs(
        hidden, weight, torch.tensor([0, 3]), 1.0, chunk_tokens=4, chunk_vocabulary=2, entropy_gradient=True
    )
    p = 1 / (1 + math.exp(-1))
    assert logprobs.tolist() == pytest.approx([math.log(p), math.log(p) - 2000], abs=1e-3)
    assert entropies.tolist() == pytest.approx(2 * [-p * math.log(p) - (1 - p) * math.log(1 - p)], abs=1e-3)
    logprobs.sum().backward()
    mean = 1000 * p + 999 * (1 - p)
    assert hidden.grad is not None
    assert hidden.grad.flatten().tolist() == pytest.approx([1000 - mean, -1000 - mean], abs=0.1)


def test_gradients_are_added_in_place_and_equal_those_that_autograd_adds() -> None:
    def twice(*, adds_to_grad: bool) -> tuple[Tensor, list[int]]:
        hidden, weight, targets = inputs()
        places = []
        for part in (slice(0, 8), slice(8, TOKENS)):
            logprobs, _ = token_logprobs(
                hidden[part], weight, targets[part], 1.0, chunk_tokens=3, chunk_vocabulary=8, adds_to_grad=adds_to_grad
            )
            (logprobs.sum() + (weight**2).sum()).backward()  # the weight has another gradient too, as a tied head
            assert weight.grad is not None
            places.append(weight.grad.data_ptr())
        assert weight.grad is not None
        return weight.grad, places

    ours, places = twice(adds_to_grad=True)
    assert places[0] == places[1]
    torch.testing.assert_close(ours, twice(adds_to_grad=False)[0], rtol=1e-12, atol=1e-12)


@pytest.mark.cuda
def test_a_compiled_head_on_a_device_keeps_its_products_alone_and_adds_exactly() -> None:
    tokens, vocabulary, width, chunk = 8192, 2**15, 256, 4096
    torch.manual_seed(0)
    hidden, weight = (
        torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) / 8 for rows in (tokens, vocabulary)
    )
    targets = torch.randint(vocabulary, (tokens,), device="cuda")
    found = []
    for compiled in (False, True, True):  # once more without the compiler's own allocations
        leaf = weight.clone().requires_grad_()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        logprobs, _ = token_logprobs(hidden, leaf, targets, 1.0, chunk_tokens=chunk, compiled=compiled)
        logprobs.sum().backward()
        assert leaf.grad is not None
        found.append((leaf.grad.double(), torch.cuda.max_memory_allocated() - before))

    (eager, _), _, (gradient, peak) = found
    assert adds_products("cuda", torch.bfloat16)
    assert ((gradient - eager).norm() / eager.norm()).item() < 0.01
    assert peak < 2 * 1.25 * chunk * vocabulary  # bytes: products in 16 bits, and sums that are far smaller
