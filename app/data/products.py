"""Generated products: "37*84=" → "3108". Too hard for the tiny model without `environment=calculator`.

Invariants:
- No question appears twice, within a split or across splits.
- The rows are the same for every run, machine and Python version: `random.Random.sample` over a range is stable.
"""

import random

from app.config.data import FACTORS, ProductsConfig
from app.data.fields import Row

NAME = "products"
SEED = 0  # not that of the run, as in arithmetic.py


def problems(config: ProductsConfig) -> tuple[list[Row], list[Row]]:
    """Draw training rows and held-out rows: disjoint, uniformly drawn pairs of factors with two digits."""
    pairs = random.Random(SEED).sample(range(len(FACTORS) ** 2), config.problems + config.eval_problems)

    rows = [_row(pair, index) for index, pair in enumerate(pairs)]
    return rows[: config.problems], rows[config.problems :]


def _row(pair: int, index: int) -> Row:
    first, second = divmod(pair, len(FACTORS))
    left = FACTORS[first]
    right = FACTORS[second]

    columns = {"question": f"{left}*{right}=", "answer": str(left * right)}
    return Row(columns["question"], columns["answer"], NAME, index, columns)
