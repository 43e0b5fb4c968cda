"""Generated products: "37*84=" → "3108". Too hard for the tiny model without `environment=calculator`.

Invariants:
- No question appears twice, within a split or across splits.
- The same seed gives the same rows on every machine and Python version: `random.Random.sample` over a range is stable.
"""

import random

from app.config.data import FACTORS, ProductsConfig
from app.data.fields import Row

NAME = "products"


def problems(config: ProductsConfig, seed: int) -> tuple[list[Row], list[Row]]:
    """Draw training rows and held-out rows: disjoint, uniformly drawn pairs of factors with two digits."""
    pairs = random.Random(seed).sample(range(len(FACTORS) ** 2), config.problems + config.eval_problems)

    rows = [_row(pair, index) for index, pair in enumerate(pairs)]
    return rows[: config.problems], rows[config.problems :]


def _row(pair: int, index: int) -> Row:
    first, second = divmod(pair, len(FACTORS))
    left = FACTORS[first]
    right = FACTORS[second]

    columns = {"question": f"{left}*{right}=", "answer": str(left * right)}
    return Row(columns["question"], columns["answer"], NAME, index, columns)
