"""What the warm-ups share: rows with a mask of what is trained on, one supervised step, greedy accuracy.

Greedy accuracy takes one teacher-forced pass: a row is correct if and only if each of its trained tokens is the most
probable one after the correct tokens before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


@dataclass(frozen=True, slots=True)
class Rows:
    """Texts that the model reads and says in turn, padded on the right."""

    ids: Tensor  # [B, L] int64
    is_said: Tensor  # [B, L] bool: tokens that the model says, end tokens included

    def select(self, indices: Sequence[int]) -> "Rows":
        return Rows(self.ids[indices], self.is_said[indices])


def encode(tokenizer: Any, texts: Sequence[Sequence[str]]) -> Rows:
    """Tokenize texts that alternate: read, said, read, said, … An end token follows what is said.

    >>> encode(tokenizer, [("1+2=", "3"), ("37*84=", "?37*84", "3108", "3108")])
    """
    parts = [text + tokenizer.eos_token * (place % 2) for row in texts for place, text in enumerate(row)]
    tokens = iter(tokenizer(parts)["input_ids"])
    encoded = [[next(tokens) for _ in row] for row in texts]
    longest = max(sum(map(len, row)) for row in encoded)

    ids = torch.full((len(texts), longest), tokenizer.pad_token_id)
    is_said = torch.zeros(len(texts), longest, dtype=torch.bool)
    for index, row in enumerate(encoded):
        start = 0
        for place, part in enumerate(row):
            ids[index, start : start + len(part)] = torch.tensor(part)
            is_said[index, start : start + len(part)] = place % 2 == 1
            start += len(part)
    return Rows(ids, is_said)


def supervised_step(model: Any, optimizer: torch.optim.Optimizer, rows: Rows, lr: float) -> None:
    """Take one step of cross entropy on what is said."""
    hidden = model.model(input_ids=rows.ids[:, :-1], use_cache=False).last_hidden_state
    is_said = rows.is_said[:, 1:]
    loss = cross_entropy(model.lm_head(hidden[is_said]), rows.ids[:, 1:][is_said])

    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    optimizer.step()


def greedy_accuracy(model: Any, rows: Rows) -> float:
    """Return the fraction of rows of which everything that is said is the greedy choice."""
    with torch.no_grad():
        greedy = model(input_ids=rows.ids[:, :-1], use_cache=False).logits.argmax(-1)
    correct = (greedy == rows.ids[:, 1:]) | ~rows.is_said[:, 1:]
    return correct.all(dim=1).double().mean().item()
