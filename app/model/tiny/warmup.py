"""Warm-up of the tiny model by supervised steps, until RL has something to reinforce.

Two phases, after the picture of a pretrained model that can do more than it shows (RL sharpens what is there):

1. skill: right answers, until the model can add ("12+34=" → "46<eos>", held-out accuracy near 1);
2. habit: rows of which a part carries a typical mistake (ten too many), until the held-out greedy accuracy has come
   down into the band asked for. Sampling then finds right and wrong answers to nearly every problem, which is what
   group advantages live from.

A model stopped early in phase 1 has the same accuracy, but its right answers are luck: sixty RL steps of 128
completions did not bring any such model above .5 (plain GRPO on this architecture, learning rates from 3e-4 to 2e-3).
Greedy accuracy is read off one teacher-forced pass: a completion is right exactly when every one of its tokens is the
most probable one after the right ones before it.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from app.config.model import TinyConfig
from app.data.row import Row
from app.errors import ConfigError

ROWS_PER_STEP = 128
SKILL_STEPS, SKILL_LR, RAMP_STEPS = 300, 5e-3, 20
SKILL, MORE_STEPS, MORE_LR, MORE_ROUNDS = 0.96, 100, 4e-3, 4  # further rounds until the held-out accuracy is SKILL
HABIT_STEPS, HABIT_LR, MISTAKEN = 200, 1e-3, 0.6  # the last: fraction of rows that carry the mistake
MARGIN = 0.15  # of the band, kept free at both ends: an engine's arithmetic may flip a close answer


@dataclass(frozen=True, slots=True)
class _Rows:
    """Questions with answers, padded on the right."""

    ids: Tensor  # [B, L] int64
    answered: Tensor  # [B, L] bool: the tokens of the answer, the end token included

    def at(self, places: Sequence[int]) -> "_Rows":
        return _Rows(self.ids[places], self.answered[places])


def warm_up(
    model: Any, tokenizer: Any, train: Sequence[Row], held_out: Sequence[Row], tiny: TinyConfig, seed: int
) -> float:
    """Train `model` in place; returns its greedy accuracy on `held_out`, which lies within the band of `tiny`."""
    choose = random.Random(seed)
    judged = _encode(tokenizer, [(row.question, row.answer) for row in held_out])
    accuracy = _pretrain(model, tokenizer, train, judged, choose)
    if accuracy < tiny.accuracy_low:
        raise ConfigError(
            f"model.tiny.hidden={tiny.hidden} is not accepted: give a model that can learn arithmetic; this one, with "
            f"model.tiny.layers={tiny.layers}, reached an accuracy of {accuracy:.2f} only."
        )
    return accuracy if accuracy <= tiny.accuracy_high else _corrupt(model, tokenizer, train, judged, tiny, choose)


def _pretrain(model: Any, tokenizer: Any, train: Sequence[Row], judged: _Rows, choose: random.Random) -> float:
    """Phase 1: a round of steps with a rising, then falling learning rate, and shorter ones if it was not enough."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.3, fused=True)
    rows = _encode(tokenizer, [(row.question, row.answer) for row in train])
    accuracy = 0.0
    for steps, lr in [(SKILL_STEPS, SKILL_LR), *[(MORE_STEPS, MORE_LR)] * MORE_ROUNDS]:
        for step in range(steps):
            chosen = choose.sample(range(len(train)), min(ROWS_PER_STEP, len(train)))
            rising, falling = (step + 1) / RAMP_STEPS, 2 * (steps - step) / steps
            _supervised_step(model, optimizer, rows.at(chosen), lr * min(1.0, rising, falling))
        accuracy = greedy_accuracy(model, judged)
        if accuracy >= SKILL:
            break
    return accuracy


def _corrupt(
    model: Any, tokenizer: Any, train: Sequence[Row], judged: _Rows, tiny: TinyConfig, choose: random.Random
) -> float:
    """Phase 2. A step that falls through the band is taken back and repeated at half the learning rate."""
    free = MARGIN * (tiny.accuracy_high - tiny.accuracy_low)
    low, high = tiny.accuracy_low + free, tiny.accuracy_high - free
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    answers = [*((row.question, row.answer) for row in train), *((row.question, _mistake(row.answer)) for row in train)]
    rows = _encode(tokenizer, answers)  # the right ones, then the mistakes
    lr, accuracy = HABIT_LR, 1.0
    for _ in range(HABIT_STEPS):
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        chosen = choose.sample(range(len(train)), min(ROWS_PER_STEP, len(train)))
        mixed = [place + len(train) if choose.random() < MISTAKEN else place for place in chosen]
        _supervised_step(model, optimizer, rows.at(mixed), lr)
        accuracy = greedy_accuracy(model, judged)
        if low <= accuracy <= high:
            return accuracy
        if accuracy < low:
            model.load_state_dict(before)
            lr /= 2
    raise ConfigError(
        f"model.tiny.accuracy_high={tiny.accuracy_high} is not accepted: give a band that the warm-up can meet; from "
        f"model.tiny.accuracy_low={tiny.accuracy_low} on, it ended at {accuracy:.2f}."
    )


def greedy_accuracy(model: Any, rows: _Rows) -> float:
    """Fraction of rows whose greedy completion is the answer followed by the end token."""
    with torch.no_grad():
        best = model(input_ids=rows.ids[:, :-1], use_cache=False).logits.argmax(-1)
    right = (best == rows.ids[:, 1:]) | ~rows.answered[:, 1:]
    return right.all(dim=1).double().mean().item()


def _supervised_step(model: Any, optimizer: torch.optim.Optimizer, rows: _Rows, lr: float) -> None:
    hidden = model.model(input_ids=rows.ids[:, :-1], use_cache=False).last_hidden_state
    answered = rows.answered[:, 1:]
    loss = cross_entropy(model.lm_head(hidden[answered]), rows.ids[:, 1:][answered])
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()


def _mistake(answer: str) -> str:
    return str(int(answer) + 10)


def _encode(tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> _Rows:
    questions = tokenizer([question for question, _ in pairs])["input_ids"]
    answers = tokenizer([answer + tokenizer.eos_token for _, answer in pairs])["input_ids"]
    longest = max(len(question) + len(answer) for question, answer in zip(questions, answers, strict=True))
    ids = torch.full((len(pairs), longest), tokenizer.pad_token_id)
    answered = torch.zeros(len(pairs), longest, dtype=torch.bool)
    for row, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        end = len(question) + len(answer)
        ids[row, :end] = torch.tensor(question + answer)
        answered[row, len(question) : end] = True
    return _Rows(ids, answered)
