"""Supervised warm-up of the tiny model, so that RL has correct answers to reinforce.

Two phases imitate a pretrained model, which can do more than its samples show:

1. pretrain: correct answers, until the model can add ("12+34=" → "46<eos>", held-out accuracy near 1);
2. corrupt: a fraction of rows has a typical mistake (ten too many), until the held-out greedy accuracy is within the
   configured band. Most groups then contain both right and wrong answers, so their advantages are non-zero.

Stopping early in phase 1 gives the same accuracy, but correct answers by chance: 60 RL steps of 128 completions brought
no such model above 0.5 (plain GRPO on this architecture, learning rates from 3e-4 to 2e-3).

Greedy accuracy takes one teacher-forced pass: a completion is correct if and only if each of its tokens is the most
probable one after the correct tokens before it.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from app.config.model import TinyConfig
from app.data.fields import Row
from app.errors import ConfigError

ROWS_PER_STEP = 128

PRETRAIN_STEPS = 300
PRETRAIN_LR = 5e-3
RAMP_STEPS = 20
PRETRAIN_ACCURACY = 0.96

# Further rounds of phase 1 until the held-out accuracy is PRETRAIN_ACCURACY.
EXTRA_ROUNDS = 4
EXTRA_STEPS = 100
EXTRA_LR = 4e-3

CORRUPT_STEPS = 200
CORRUPT_LR = 1e-3
MISTAKE_FRACTION = 0.6  # of the rows in a step

# Fraction of the band left free at both ends: the arithmetic of an engine may flip a close answer.
MARGIN = 0.15


@dataclass(frozen=True, slots=True)
class _Rows:
    """Questions with answers, padded on the right."""

    ids: Tensor  # [B, L] int64
    is_answer: Tensor  # [B, L] bool: tokens of the answer, end token included

    def select(self, indices: Sequence[int]) -> "_Rows":
        return _Rows(self.ids[indices], self.is_answer[indices])


def warm_up(
    model: Any, tokenizer: Any, train: Sequence[Row], held_out: Sequence[Row], tiny: TinyConfig, seed: int
) -> float:
    """Train `model` in place and return its greedy accuracy on `held_out`.

    Raises:
        ConfigError: If the accuracy cannot be brought into the band of `tiny`.
    """
    rng = random.Random(seed)
    held_out_rows = _encode(tokenizer, [(row.question, row.answer) for row in held_out])

    accuracy = _pretrain(model, tokenizer, train, held_out_rows, rng)
    if accuracy < tiny.accuracy_low:
        raise ConfigError(
            f"model.tiny.hidden={tiny.hidden} is not accepted: give a model that can learn arithmetic; with "
            f"model.tiny.layers={tiny.layers}, this one only reached an accuracy of {accuracy:.2f}."
        )
    if accuracy <= tiny.accuracy_high:
        return accuracy
    return _corrupt(model, tokenizer, train, held_out_rows, tiny, rng)


def _pretrain(model: Any, tokenizer: Any, train: Sequence[Row], held_out: _Rows, rng: random.Random) -> float:
    """Phase 1: a round of steps with a ramped, then decaying learning rate, and shorter rounds if necessary."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.3, fused=True)
    rows = _encode(tokenizer, [(row.question, row.answer) for row in train])

    accuracy = 0.0
    for steps, lr in [(PRETRAIN_STEPS, PRETRAIN_LR), *[(EXTRA_STEPS, EXTRA_LR)] * EXTRA_ROUNDS]:
        for step in range(steps):
            indices = rng.sample(range(len(train)), min(ROWS_PER_STEP, len(train)))
            ramp = (step + 1) / RAMP_STEPS
            decay = 2 * (steps - step) / steps
            _supervised_step(model, optimizer, rows.select(indices), lr * min(1.0, ramp, decay))

        accuracy = greedy_accuracy(model, held_out)
        if accuracy >= PRETRAIN_ACCURACY:
            break
    return accuracy


def _corrupt(
    model: Any, tokenizer: Any, train: Sequence[Row], held_out: _Rows, tiny: TinyConfig, rng: random.Random
) -> float:
    """Phase 2. A step that overshoots the band is undone and repeated at half the learning rate."""
    margin = MARGIN * (tiny.accuracy_high - tiny.accuracy_low)
    low = tiny.accuracy_low + margin
    high = tiny.accuracy_high - margin
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    # Row i is correct, row i + len(train) has the mistake.
    correct = [(row.question, row.answer) for row in train]
    mistaken = [(row.question, _mistake(row.answer)) for row in train]
    rows = _encode(tokenizer, correct + mistaken)

    lr = CORRUPT_LR
    accuracy = 1.0
    for _ in range(CORRUPT_STEPS):
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        sampled = rng.sample(range(len(train)), min(ROWS_PER_STEP, len(train)))
        indices = [index + len(train) if rng.random() < MISTAKE_FRACTION else index for index in sampled]
        _supervised_step(model, optimizer, rows.select(indices), lr)

        accuracy = greedy_accuracy(model, held_out)
        if low <= accuracy <= high:
            return accuracy
        if accuracy < low:
            model.load_state_dict(before)
            lr /= 2

    raise ConfigError(
        f"model.tiny.accuracy_high={tiny.accuracy_high} is not accepted: give a band that the warm-up can reach; with "
        f"model.tiny.accuracy_low={tiny.accuracy_low} it ended at {accuracy:.2f}."
    )


def greedy_accuracy(model: Any, rows: _Rows) -> float:
    """Fraction of rows whose greedy completion is the answer followed by the end token."""
    with torch.no_grad():
        greedy = model(input_ids=rows.ids[:, :-1], use_cache=False).logits.argmax(-1)
    correct = (greedy == rows.ids[:, 1:]) | ~rows.is_answer[:, 1:]
    return correct.all(dim=1).double().mean().item()


def _supervised_step(model: Any, optimizer: torch.optim.Optimizer, rows: _Rows, lr: float) -> None:
    hidden = model.model(input_ids=rows.ids[:, :-1], use_cache=False).last_hidden_state
    is_answer = rows.is_answer[:, 1:]
    loss = cross_entropy(model.lm_head(hidden[is_answer]), rows.ids[:, 1:][is_answer])

    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    optimizer.step()


def _mistake(answer: str) -> str:
    return str(int(answer) + 10)


def _encode(tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> _Rows:
    questions = tokenizer([question for question, _ in pairs])["input_ids"]
    answers = tokenizer([answer + tokenizer.eos_token for _, answer in pairs])["input_ids"]
    longest = max(len(question) + len(answer) for question, answer in zip(questions, answers, strict=True))

    ids = torch.full((len(pairs), longest), tokenizer.pad_token_id)
    is_answer = torch.zeros(len(pairs), longest, dtype=torch.bool)
    for row, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        end = len(question) + len(answer)
        ids[row, :end] = torch.tensor(question + answer)
        is_answer[row, len(question) : end] = True
    return _Rows(ids, is_answer)
