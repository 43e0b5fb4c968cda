"""`data.generator`: problems that are drawn, not read. The tiny models learned their skill from them.

| generator  | row                    | difficulty                                                               |
|------------|------------------------|--------------------------------------------------------------------------|
| arithmetic | "12+34=" → "46"        | within reach of the tiny model                                           |
| products   | "37*84=" → "3108"      | too hard for it without `environment=calculator`                         |
| chain      | "12*7+30=" → "114"     | two calls of `environment=calculator`; only the second factor has one digit |

Invariants:
- No question appears twice, within a split or across splits.
- The rows are the same for every run, machine and Python version: `random.Random.sample` over a range is stable.
"""

import random
from collections.abc import Callable

from app.config.data import DIGITS, FACTORS, ArithmeticConfig, ChainConfig, GeneratorConfig, ProductsConfig
from app.data.fields import Row

SEED = 0  # not that of the run: runs are comparable, and a tiny model has not seen the held-out rows
Rows = tuple[list[Row], list[Row]]  # for training, held out


def arithmetic(config: ArithmeticConfig) -> Rows:
    """Draw sums of operands from 0 to `max_operand`."""
    base = config.max_operand + 1

    def problem(number: int) -> tuple[str, int]:
        left, right = divmod(number, base)
        return f"{left}+{right}", left + right

    return _draw("arithmetic", problem, config)


def products(config: ProductsConfig) -> Rows:
    """Draw products of factors with two digits."""

    def problem(number: int) -> tuple[str, int]:
        first, second = divmod(number, len(FACTORS))
        return f"{FACTORS[first]}*{FACTORS[second]}", FACTORS[first] * FACTORS[second]

    return _draw("products", problem, config)


def chain(config: ChainConfig) -> Rows:
    """Draw chains of a product and a sum."""

    def problem(number: int) -> tuple[str, int]:
        rest, third = divmod(number, len(FACTORS))
        first, second = divmod(rest, len(DIGITS))
        left, right, addend = FACTORS[first], DIGITS[second], FACTORS[third]
        return f"{left}*{right}+{addend}", left * right + addend

    return _draw("chain", problem, config)


def _draw(name: str, problem: Callable[[int], tuple[str, int]], config: GeneratorConfig) -> Rows:
    """Draw from the problems with the numbers 0 to `config.distinct`, uniformly."""
    drawn = random.Random(SEED).sample(range(config.distinct), config.problems + config.eval_problems)

    rows = []
    for index, number in enumerate(drawn):
        term, result = problem(number)
        columns = {"question": f"{term}=", "answer": str(result)}
        rows.append(Row(columns["question"], columns["answer"], name, index, columns))
    return rows[: config.problems], rows[config.problems :]
