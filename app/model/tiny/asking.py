"""Supervised warm-up of the tiny model that can ask a calculator, but hardly ever does.

Two phases:

1. skill: "37*84=" → "?37*84", then "3108" after the calculator's line; chains ask twice. A fraction of rows answers
   without asking: the first factor times a hundred ("3700"), which is always wrong;
2. habit: that lazy answer becomes usual. The model asks in `ASKS` of its samples and never where it is greedy.

The lazy answer has one first token for a question, so that it is the most probable one. The model cannot multiply:
where it could, RL would improve that and ignore the calculator.
"""

import random
import re
from collections.abc import Sequence
from typing import Any

import torch

from app.config.model import TinyConfig
from app.data.fields import Row
from app.environment.calculator import ASK, answer
from app.errors import ConfigError
from app.model.tiny.supervised import Rows, encode, greedy_accuracy, supervised_step

SKILL_STEPS = 400
SKILL_LR = 1e-2
SKILL_ROWS = 48  # per step
SKILL_ASKS = 0.7  # of the rows in a step
SKILL_ACCURACY = 0.97
RAMP_STEPS = 20

# Further rounds of phase 1 until the held-out accuracy is SKILL_ACCURACY.
EXTRA_ROUNDS = 4
EXTRA_STEPS = 100
EXTRA_LR = 4e-3

HABIT_STEPS = 40
HABIT_ROUNDS = 4
HABIT_LR = 1e-3
HABIT_ROWS = 120  # per step
ASKS = 0.15  # of the rows in a step, and of the samples thereafter
ASKS_LOW, ASKS_HIGH = 0.10, 0.20  # mean probability of asking
ASKS_MOST = 0.40  # of any question: the engine's arithmetic must not flip a greedy choice


def warm_up(
    model: Any, tokenizer: Any, train: Sequence[Row], held_out: Sequence[Row], tiny: TinyConfig, seed: int
) -> float:
    """Train `model` in place and return how probable it is that it asks, as a mean over `held_out`.

    Raises:
        ConfigError: The model learns neither to ask nor to copy what it is told.
    """
    rng = random.Random(seed)

    accuracy = _skill(model, tokenizer, train, held_out, rng)
    if accuracy < SKILL_ACCURACY:
        raise _refusal(tiny, f"after it has asked, only {accuracy:.0%} of its replies are what they should be")

    mean, most = _habit(model, tokenizer, train, held_out, rng)
    if not ASKS_LOW <= mean <= ASKS_HIGH or most > ASKS_MOST:
        raise _refusal(tiny, f"it asks with a probability of {mean:.2f}, and of {most:.2f} for some question")
    return mean


def asking(question: str) -> tuple[str, ...]:
    r"""Return an episode in which the calculator is asked: texts that are read and said in turn.

    >>> asking("12*7+30=")
    ('12*7+30=', '?12*7', '84\n', '?84+30', '114\n', '114')
    """
    left, right, *addends = re.findall(r"\d+", question)
    texts = [question, f"{ASK}{left}*{right}", answer(f"{left}*{right}")]
    for addend in addends:
        result = texts[-1].strip()
        texts += [f"{ASK}{result}+{addend}", answer(f"{result}+{addend}")]
    return (*texts, texts[-1].strip())


def lazy(question: str) -> tuple[str, ...]:
    """Return an episode that ends with a wrong answer.

    >>> lazy("37*84=")
    ('37*84=', '3700')
    """
    return question, f"{question.partition('*')[0]}00"


def _skill(model: Any, tokenizer: Any, train: Sequence[Row], held_out: Sequence[Row], rng: random.Random) -> float:
    """Phase 1: a round of steps with a ramped, then decaying learning rate, and shorter rounds if necessary."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.3, fused=True)
    rows = _both(tokenizer, train)
    after_asking = _after_first_token(encode(tokenizer, [asking(row.question) for row in held_out]))

    accuracy = 0.0
    for steps, lr in [(SKILL_STEPS, SKILL_LR), *[(EXTRA_STEPS, EXTRA_LR)] * EXTRA_ROUNDS]:
        for step in range(steps):
            indices = _mixed(len(train), SKILL_ROWS, SKILL_ASKS, rng)
            ramp = (step + 1) / RAMP_STEPS
            decay = 2 * (steps - step) / steps
            supervised_step(model, optimizer, rows.select(indices), lr * min(1.0, ramp, decay))

        accuracy = greedy_accuracy(model, after_asking)
        if accuracy >= SKILL_ACCURACY:
            break
    return accuracy


def _habit(
    model: Any, tokenizer: Any, train: Sequence[Row], held_out: Sequence[Row], rng: random.Random
) -> tuple[float, float]:
    """Phase 2. Returns the mean and the largest probability of asking."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    rows = _both(tokenizer, train)

    mean, most = 1.0, 1.0
    for _ in range(HABIT_ROUNDS):
        for step in range(HABIT_STEPS):
            indices = _mixed(len(train), HABIT_ROWS, ASKS, rng)
            decay = 2 * (HABIT_STEPS - step) / HABIT_STEPS
            supervised_step(model, optimizer, rows.select(indices), HABIT_LR * min(1.0, decay))

        mean, most = asks(model, tokenizer, [row.question for row in held_out])
        if ASKS_LOW <= mean <= ASKS_HIGH and most <= ASKS_MOST:
            break
    return mean, most


def asks(model: Any, tokenizer: Any, questions: Sequence[str]) -> tuple[float, float]:
    """Return the probability that a reply asks: its mean over questions, and the largest."""
    rows = encode(tokenizer, [(question, ASK) for question in questions])
    asked = tokenizer.convert_tokens_to_ids(ASK)
    first = rows.is_said.int().argmax(1)
    with torch.no_grad():
        logits = model(input_ids=rows.ids, use_cache=False).logits
    probabilities = logits[torch.arange(len(questions)), first - 1].softmax(-1)[:, asked]
    return probabilities.mean().item(), probabilities.max().item()


def _both(tokenizer: Any, train: Sequence[Row]) -> Rows:
    """Encode every problem twice: row i asks, row i + len(train) is lazy."""
    return encode(tokenizer, [*(asking(row.question) for row in train), *(lazy(row.question) for row in train)])


def _mixed(problems: int, rows: int, asks_fraction: float, rng: random.Random) -> list[int]:
    """Draw rows of `_both`, of which exactly a fraction asks."""
    drawn = rng.sample(range(problems), min(rows, problems))
    asking_rows = round(asks_fraction * len(drawn))
    return [index if place < asking_rows else index + problems for place, index in enumerate(drawn)]


def _after_first_token(rows: Rows) -> Rows:
    """Exclude the first token that is said, which decides between asking and not."""
    is_said = rows.is_said.clone()
    is_said[torch.arange(len(is_said)), rows.is_said.int().argmax(1)] = False
    return Rows(rows.ids, is_said)


def _refusal(tiny: TinyConfig, why: str) -> ConfigError:
    return ConfigError(
        f"model.tiny.hidden={tiny.hidden} is not accepted: give a model that can learn to ask; with "
        f"model.tiny.layers={tiny.layers}, {why}."
    )
