"""Generated chains of a product and a sum: "12*7+30=" → "114". `environment=calculator` needs two calls for one.

Invariants:
- No question appears twice, within a split or across splits.
- The rows are the same for every run, machine and Python version: `random.Random.sample` over a range is stable.
"""

import random

from app.config.data import DIGITS, FACTORS, ChainConfig
from app.data.fields import Row

NAME = "chain"
SEED = 0  # not that of the run, as in arithmetic.py


def problems(config: ChainConfig) -> tuple[list[Row], list[Row]]:
    """Draw training rows and held-out rows: disjoint, uniform. Only the second factor has one digit."""
    total = len(FACTORS) * len(DIGITS) * len(FACTORS)
    drawn = random.Random(SEED).sample(range(total), config.problems + config.eval_problems)

    rows = [_row(each, index) for index, each in enumerate(drawn)]
    return rows[: config.problems], rows[config.problems :]


def _row(number: int, index: int) -> Row:
    rest, third = divmod(number, len(FACTORS))
    first, second = divmod(rest, len(DIGITS))
    left = FACTORS[first]
    right = DIGITS[second]
    addend = FACTORS[third]

    columns = {"question": f"{left}*{right}+{addend}=", "answer": str(left * right + addend)}
    return Row(columns["question"], columns["answer"], NAME, index, columns)
