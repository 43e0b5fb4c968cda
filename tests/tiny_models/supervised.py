"""What the warm-ups share: rows with a mask of what is trained on, one supervised step, greedy accuracy.

Greedy accuracy takes one teacher-forced pass: a row is correct if and only if each of its trained tokens is the most
probable one after the correct tokens before it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

RAMP_STEPS = 20
EXTRA_ROUNDS, EXTRA_STEPS, EXTRA_LR = 4, 100, 4e-3  # further rounds until the held-out accuracy is the goal


@dataclass(frozen=True, slots=True)
class Rows:
    """Observed and sampled texts in turn, padded on the right."""

    ids: Tensor  # [B, L] int64
    is_trained: Tensor  # [B, L] bool: sampled tokens, end tokens included

    def select(self, indices: Sequence[int]) -> "Rows":
        return Rows(self.ids[indices], self.is_trained[indices])


def encode(tokenizer: Any, texts: Sequence[Sequence[str]]) -> Rows:
    """Tokenize texts that alternate: observed, sampled, observed, sampled, … An end token follows what is sampled.

    >>> encode(tokenizer, [("1+2=", "3"), ("37*84=", "?37*84", "3108", "3108")])
    """
    parts = [text + tokenizer.eos_token * (position % 2) for row in texts for position, text in enumerate(row)]
    tokens = iter(tokenizer(parts)["input_ids"])
    encoded = [[next(tokens) for _ in row] for row in texts]
    longest = max(sum(map(len, row)) for row in encoded)

    ids = torch.full((len(texts), longest), tokenizer.pad_token_id)
    is_trained = torch.zeros(len(texts), longest, dtype=torch.bool)
    for index, row in enumerate(encoded):
        start = 0
        for position, part in enumerate(row):
            ids[index, start : start + len(part)] = torch.tensor(part)
            is_trained[index, start : start + len(part)] = position % 2 == 1
            start += len(part)
    return Rows(ids, is_trained)


def supervised_step(model: Any, optimizer: torch.optim.Optimizer, rows: Rows, lr: float) -> None:
    """Take one step of cross entropy on the sampled tokens."""
    hidden = model.model(input_ids=rows.ids[:, :-1], use_cache=False).last_hidden_state
    is_trained = rows.is_trained[:, 1:]
    loss = cross_entropy(model.lm_head(hidden[is_trained]), rows.ids[:, 1:][is_trained])

    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    optimizer.step()


def train_rounds(
    model: Any,
    rows: Rows,
    drawn: Callable[[], Sequence[int]],
    held_out: Rows,
    first: tuple[int, float],
    *,
    beta2: float,
    goal: float,
) -> float:
    """Train a first round of (steps, learning rate) and shorter ones until the accuracy is `goal`. Returns it.

    In a round the learning rate is ramped and then decays.
    """
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, beta2), weight_decay=0.3, fused=True)
    accuracy = 0.0
    for steps, lr in (first, *[(EXTRA_STEPS, EXTRA_LR)] * EXTRA_ROUNDS):
        for step in range(steps):
            ramp = (step + 1) / RAMP_STEPS
            decay = 2 * (steps - step) / steps
            supervised_step(model, optimizer, rows.select(drawn()), lr * min(1.0, ramp, decay))

        accuracy = greedy_accuracy(model, held_out)
        if accuracy >= goal:
            break
    return accuracy


def greedy_accuracy(model: Any, rows: Rows) -> float:
    """Return the fraction of rows whose sampled tokens are all the greedy choice."""
    with torch.no_grad():
        greedy = model(input_ids=rows.ids[:, :-1], use_cache=False).logits.argmax(-1)
    correct = (greedy == rows.ids[:, 1:]) | ~rows.is_trained[:, 1:]
    return correct.all(dim=1).double().mean().item()
