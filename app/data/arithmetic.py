"""Generated additions: "12+34=" → "46". Also the warm-up data of the tiny model.

Invariants:
- No question appears twice, within a split or across splits.
- The rows are the same for every run, machine and Python version: `random.Random.sample` over a range is stable.
"""

import random

from app.config.data import ArithmeticConfig
from app.data.fields import Row

NAME = "arithmetic"
SEED = 0  # not that of the run: runs are comparable, and a tiny model has not seen the held-out rows


def problems(config: ArithmeticConfig) -> tuple[list[Row], list[Row]]:
    """Draw training rows and held-out rows: disjoint, uniformly drawn pairs of operands from 0 to `max_operand`."""
    base = config.max_operand + 1
    pairs = random.Random(SEED).sample(range(base * base), config.problems + config.eval_problems)

    rows = [_row(*divmod(pair, base), index) for index, pair in enumerate(pairs)]
    return rows[: config.problems], rows[config.problems :]


def _row(left: int, right: int, index: int) -> Row:
    columns = {"question": f"{left}+{right}=", "answer": str(left + right)}
    return Row(columns["question"], columns["answer"], NAME, index, columns)
