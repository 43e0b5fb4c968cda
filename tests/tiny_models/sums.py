"""Supervised warm-up of `tiny` and `tiny_qwen35`, so that RL has correct answers to reinforce.

Two phases imitate a pretrained model, which can do more than its samples show:

1. pretrain: correct answers, until the model can add ("12+34=" → "46<eos>", held-out accuracy near 1);
2. corrupt: a fraction of rows has a typical mistake (ten too many), until the held-out greedy accuracy is within
   `ACCURACY`. Most groups then contain both right and wrong answers, so their advantages are non-zero.

Stopping early in phase 1 gives the same accuracy, but correct answers by chance: 60 RL steps of 128 completions brought
no such model above 0.5 (plain GRPO on this architecture, learning rates from 3e-4 to 2e-3).
"""

import random
from collections.abc import Sequence
from typing import Any

import torch

from app.data.row import Row
from tests.tiny_models.supervised import Rows, encode, greedy_accuracy, supervised_step, train_rounds

ROWS_PER_STEP = 128

PRETRAIN_STEPS = 300
PRETRAIN_LR = 5e-3
PRETRAIN_ACCURACY = 0.96

CORRUPT_STEPS = 200
CORRUPT_LR = 1e-3
MISTAKE_FRACTION = 0.6  # of the rows in a step

ACCURACY = (0.20, 0.45)  # greedy, of the held-out rows, after the warm-up
# Fraction of this band left free at both ends: the arithmetic of an engine may flip a close answer.
MARGIN = 0.15


def warm_up(model: Any, tokenizer: Any, train: Sequence[Row], held_out: Sequence[Row], seed: int) -> float:
    """Train `model` in place and return its greedy accuracy on `held_out`.

    Raises:
        RuntimeError: The accuracy cannot be brought into the band.
    """
    rng = random.Random(seed)
    held_out_rows = encode(tokenizer, [(row.question, row.answer) for row in held_out])
    rows = encode(tokenizer, [(row.question, row.answer) for row in train])

    def drawn() -> list[int]:
        return rng.sample(range(len(train)), min(ROWS_PER_STEP, len(train)))

    first = (PRETRAIN_STEPS, PRETRAIN_LR)  # phase 1; then shorter rounds if necessary
    accuracy = train_rounds(model, rows, drawn, held_out_rows, first, beta2=0.95, goal=PRETRAIN_ACCURACY)
    low, high = ACCURACY
    if accuracy < low:
        raise RuntimeError(f"the model cannot learn to add: its accuracy is {accuracy:.2f}")
    if accuracy <= high:
        return accuracy
    return _corrupt(model, tokenizer, train, held_out_rows, rng)


def _corrupt(model: Any, tokenizer: Any, train: Sequence[Row], held_out: Rows, rng: random.Random) -> float:
    """Phase 2. A step that overshoots the band is undone and repeated at half the learning rate."""
    margin = MARGIN * (ACCURACY[1] - ACCURACY[0])
    low = ACCURACY[0] + margin
    high = ACCURACY[1] - margin
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    # Row i is correct, row i + len(train) has the mistake.
    correct = [(row.question, row.answer) for row in train]
    mistaken = [(row.question, str(int(row.answer) + 10)) for row in train]
    rows = encode(tokenizer, correct + mistaken)

    lr = CORRUPT_LR
    accuracy = 1.0
    for _ in range(CORRUPT_STEPS):
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        sampled = rng.sample(range(len(train)), min(ROWS_PER_STEP, len(train)))
        indices = [index + len(train) if rng.random() < MISTAKE_FRACTION else index for index in sampled]
        supervised_step(model, optimizer, rows.select(indices), lr)

        accuracy = greedy_accuracy(model, held_out)
        if low <= accuracy <= high:
            return accuracy
        if accuracy < low:
            model.load_state_dict(before)
            lr /= 2

    raise RuntimeError(f"no step of the warm-up ended between {low:.2f} and {high:.2f}; the last one at {accuracy:.2f}")
