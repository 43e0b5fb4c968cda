"""The KL penalty against exact gradients of policies that can be enumerated, and k3 near zero in single precision.

A policy is a table of logits θ [state, token]. Its exact gradients are closed forms in numpy, without `app`:
∂KL(π ‖ q)/∂θ = π · (log π/q − KL) and ∂KL(q ‖ π)/∂θ = π − q, in each state.
"""

from itertools import product

import numpy as np
import pytest
import torch

from app.algorithm.loss import k3, policy_loss
from app.algorithm.objective import TokenBatch
from app.config.algorithm import Aggregation, AlgorithmConfig, Correction, Kl

BETA = 0.7
TOKENS = 4
LENGTH = 2
STATES = [(), *product(range(TOKENS), repeat=1)]  # prefixes
COMPLETIONS = list(product(range(TOKENS), repeat=LENGTH))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def policies(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits of the policy and log-probabilities of the reference, both [state, token]."""
    random = np.random.default_rng(seed)
    return random.normal(size=(len(STATES), TOKENS)), log_softmax(random.normal(size=(len(STATES), TOKENS)))


def visits(logs: np.ndarray) -> np.ndarray:
    """The probability of each state under the policy: [state, 1]."""
    return np.concatenate([[1.0], np.exp(logs[0])])[:, None]


def expected_gradient(kind: Kl, logits: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """The gradient of the loss, in expectation over all completions that the policy can sample.

    Each completion is a sequence of the batch, whose weight is its probability.
    """
    theta = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    states = torch.tensor([STATES.index(completion[:t]) for completion in COMPLETIONS for t in range(LENGTH)])
    tokens = torch.tensor([completion[t] for completion in COMPLETIONS for t in range(LENGTH)])
    logprobs = torch.log_softmax(theta, dim=-1)[states, tokens]

    batch = TokenBatch(
        logprobs=logprobs,
        old_logprobs=None,
        rollout_logprobs=logprobs.detach(),
        reference_logprobs=torch.tensor(reference)[states, tokens],
        entropy=torch.zeros_like(logprobs),
        sequence=torch.arange(len(COMPLETIONS)).repeat_interleave(LENGTH),
        advantages=torch.zeros(len(COMPLETIONS), dtype=torch.float64),
        lengths=torch.full((len(COMPLETIONS),), LENGTH),
        trajectory_tokens=torch.full((len(COMPLETIONS),), LENGTH),
        weight_mask=logprobs.detach().view(-1, LENGTH).sum(dim=1).exp(),
    )
    config = AlgorithmConfig(kl=kind, kl_coefficient=BETA, aggregation=Aggregation.seq_mean_token_sum)
    policy_loss(batch, config, Correction.none).loss.backward()
    assert theta.grad is not None
    return theta.grad.numpy()


def gradient_of_kl_to_reference(logits: np.ndarray, reference: np.ndarray) -> np.ndarray:
    logs = log_softmax(logits)
    divergence = (np.exp(logs) * (logs - reference)).sum(axis=1, keepdims=True)
    return visits(logs) * np.exp(logs) * (logs - reference - divergence)


def gradient_of_kl_from_reference(logits: np.ndarray, reference: np.ndarray) -> np.ndarray:
    logs = log_softmax(logits)
    return visits(logs) * (np.exp(logs) - np.exp(reference))


EXACT = {Kl.k2: gradient_of_kl_to_reference, Kl.k3: gradient_of_kl_from_reference}


@pytest.mark.parametrize("kind", EXACT)
def test_the_expected_gradient_of_a_penalty_is_the_exact_gradient_of_its_divergence(kind: Kl) -> None:
    logits, reference = policies(0)
    exact = BETA * EXACT[kind](logits, reference)
    assert expected_gradient(kind, logits, reference) == pytest.approx(exact, rel=1e-10, abs=1e-14)


def test_k3_is_exact_and_never_negative_in_single_precision() -> None:
    magnitudes = torch.logspace(-9, 1, 2001, dtype=torch.float64)
    single = torch.cat([-magnitudes, torch.zeros(1, dtype=torch.float64), magnitudes]).float()
    double = single.double()
    exact = torch.where(double.abs() < 1e-3, double.square() / 2 * (1 + double / 3), double.expm1() - double)

    values = k3(single)
    assert values.min() >= 0
    # The rounding error is relative to the log-ratio, not to 1.
    errors = (values.double() - exact).abs()
    assert bool((errors <= 2e-7 * double.abs() * double.exp().clamp(min=1)).all())
