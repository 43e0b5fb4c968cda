"""Supervised warm-up of `tiny_tools`: teach the tool call, then bias the model against it, so that RL has a use for it.

Two phases:

1. skill: "37*84=" → "?37*84", then "3108" after the calculator's line; chains call it twice. A fraction of rows answers
   without a call: the first factor times a hundred ("3700"), which is always wrong;
2. bias: most rows have that wrong answer. The model calls in `CALLS` of its samples, and never where it is greedy.

The wrong answer has one first token for a question, so that it is the most probable one. The model cannot multiply:
where it could, RL would improve that and ignore the calculator.
"""

import random
import re
from collections.abc import Sequence
from typing import Any

import torch

from app.data.row import Row
from app.environment.calculator import ASK, answer
from tests.tiny_models.supervised import Rows, encode, supervised_step, train_rounds

SKILL_STEPS = 400
SKILL_LR = 1e-2
SKILL_ROWS = 48  # per step
SKILL_CALLS = 0.7  # of the rows in a step
SKILL_ACCURACY = 0.97

BIAS_STEPS = 40
BIAS_ROUNDS = 4
BIAS_LR = 1e-3
BIAS_ROWS = 120  # per step
CALLS = 0.15  # of the rows in a step, and of the samples thereafter
MIN_CALLS, MAX_CALLS = 0.10, 0.20  # mean probability of a call
MAX_CALLS_OF_A_QUESTION = 0.40  # the engine's arithmetic must not flip a greedy choice


def chains() -> tuple[list[Row], list[Row]]:
    """Draw questions that take two calls, such as 12*7+30=: 2,000 to train on and 200 held out."""
    rows = []
    for index, number in enumerate(random.Random(0).sample(range(90 * 8 * 90), 2200)):
        left, rest = divmod(number, 8 * 90)
        right, addend = divmod(rest, 90)
        left, right, addend = left + 10, right + 2, addend + 10
        question, result = f"{left}*{right}+{addend}=", str(left * right + addend)
        rows.append(Row(question, result, "chain", index, {"question": question, "answer": result}))
    return rows[:2000], rows[2000:]


def warm_up(model: Any, tokenizer: Any, train: Sequence[Row], held_out: Sequence[Row], seed: int) -> float:
    """Train `model` in place and return the probability of a call, as a mean over `held_out`.

    Raises:
        RuntimeError: The model learns neither to call nor to copy the result.
    """
    rng = random.Random(seed)
    rows = _both(tokenizer, train)
    after_calls = _after_first_token(encode(tokenizer, [with_calls(row.question) for row in held_out]))

    def drawn() -> list[int]:
        return _mixed(len(train), SKILL_ROWS, SKILL_CALLS, rng)

    first = (SKILL_STEPS, SKILL_LR)  # phase 1; then shorter rounds if necessary
    accuracy = train_rounds(model, rows, drawn, after_calls, first, beta2=0.99, goal=SKILL_ACCURACY)
    if accuracy < SKILL_ACCURACY:
        raise RuntimeError(
            f"the model cannot learn to call a tool: after a call, {accuracy:.0%} of its replies are right"
        )

    mean, largest = _bias(model, tokenizer, rows, held_out, rng)
    if not MIN_CALLS <= mean <= MAX_CALLS or largest > MAX_CALLS_OF_A_QUESTION:
        raise RuntimeError(f"the probability of a call is {mean:.2f}, and {largest:.2f} for some question")
    return mean


def with_calls(question: str) -> tuple[str, ...]:
    r"""Return an episode that uses the calculator: observed and sampled texts in turn.

    >>> with_calls("12*7+30=")
    ('12*7+30=', '?12*7', '84\n', '?84+30', '114\n', '114')
    """
    left, right, *addends = re.findall(r"\d+", question)
    texts = [question, f"{ASK}{left}*{right}", answer(f"{left}*{right}")]
    for addend in addends:
        result = texts[-1].strip()
        texts += [f"{ASK}{result}+{addend}", answer(f"{result}+{addend}")]
    return (*texts, texts[-1].strip())


def without_call(question: str) -> tuple[str, ...]:
    """Return an episode that ends with a wrong answer.

    >>> without_call("37*84=")
    ('37*84=', '3700')
    """
    return question, f"{question.partition('*')[0]}00"


def _bias(model: Any, tokenizer: Any, rows: Rows, held_out: Sequence[Row], rng: random.Random) -> tuple[float, float]:
    """Phase 2, on the rows of phase 1. Returns the mean and the largest probability of a call."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    mean, largest = 1.0, 1.0
    for _ in range(BIAS_ROUNDS):
        for step in range(BIAS_STEPS):
            indices = _mixed(len(rows.ids) // 2, BIAS_ROWS, CALLS, rng)
            decay = 2 * (BIAS_STEPS - step) / BIAS_STEPS
            supervised_step(model, optimizer, rows.select(indices), BIAS_LR * min(1.0, decay))

        mean, largest = call_probability(model, tokenizer, [row.question for row in held_out])
        if MIN_CALLS <= mean <= MAX_CALLS and largest <= MAX_CALLS_OF_A_QUESTION:
            break
    return mean, largest


def call_probability(model: Any, tokenizer: Any, questions: Sequence[str]) -> tuple[float, float]:
    """Return the probability that a reply is a tool call: its mean over questions, and the largest."""
    rows = encode(tokenizer, [(question, ASK) for question in questions])
    call = tokenizer.convert_tokens_to_ids(ASK)
    first = rows.is_trained.int().argmax(1)
    with torch.no_grad():
        logits = model(input_ids=rows.ids, use_cache=False).logits
    probabilities = logits[torch.arange(len(questions)), first - 1].softmax(-1)[:, call]
    return probabilities.mean().item(), probabilities.max().item()


def _both(tokenizer: Any, train: Sequence[Row]) -> Rows:
    """Encode every problem twice: row i with calls, row i + len(train) without."""
    questions = [row.question for row in train]
    return encode(tokenizer, [*map(with_calls, questions), *map(without_call, questions)])


def _mixed(problems: int, rows: int, call_fraction: float, rng: random.Random) -> list[int]:
    """Draw rows of `_both`, of which exactly a fraction has calls."""
    drawn = rng.sample(range(problems), min(rows, problems))
    call_rows = round(call_fraction * len(drawn))
    return [index if position < call_rows else index + problems for position, index in enumerate(drawn)]


def _after_first_token(rows: Rows) -> Rows:
    """Exclude the first sampled token, which decides between a call and an answer."""
    is_trained = rows.is_trained.clone()
    is_trained[torch.arange(len(is_trained)), rows.is_trained.int().argmax(1)] = False
    return Rows(rows.ids, is_trained)
