"""Generated problems: their answers, their splits, and the presets that select them."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from app.config.data import ArithmeticConfig, ChainConfig, ProductsConfig
from app.data import rows
from app.data.generators import Rows, arithmetic, chain, products
from tests.compose import composed
from tests.refusals import refused

Draw = Callable[[Any], Rows]


@pytest.mark.parametrize(
    ("draw", "config", "pattern"),
    [
        (arithmetic, ArithmeticConfig(problems=80, eval_problems=20, max_operand=9), r"\d\+\d="),
        (products, ProductsConfig(problems=8000, eval_problems=100), r"[1-9]\d\*[1-9]\d="),
        (chain, ChainConfig(problems=900, eval_problems=100), r"[1-9]\d\*[2-9]\+[1-9]\d="),
    ],
)
def test_the_answers_are_right_and_no_question_appears_twice(draw: Draw, config: Any, pattern: str) -> None:
    train, held_out = draw(config)
    assert (len(train), len(held_out)) == (config.problems, config.eval_problems)
    members = train + held_out
    assert len({row.question for row in members}) == len({row.index for row in members}) == len(members)
    for row in members:
        assert re.fullmatch(pattern, row.question)
        assert row.answer == str(eval(row.question.removesuffix("=")))


@pytest.mark.parametrize(
    ("draw", "config", "first"),
    [
        (arithmetic, ArithmeticConfig(problems=100, eval_problems=10), "30+47="),
        (products, ProductsConfig(), "86*87="),
        (chain, ChainConfig(), "86*8+90="),
    ],
)
def test_every_run_has_the_same_problems(draw: Draw, config: Any, first: str) -> None:
    assert draw(config) == draw(config)
    assert draw(config)[0][0].question == first


@pytest.mark.parametrize(("name", "symbols"), [("arithmetic", "+"), ("products", "*"), ("chain", "*+")])
def test_a_preset_selects_its_problems_and_their_name(name: str, symbols: str) -> None:
    config = composed(f"data={name}", f"data.{name}.problems=7", f"data.{name}.eval_problems=2")
    loaded = rows.load(config.data)
    assert (len(loaded.train), len(loaded.evals["eval"])) == (7, 2)
    assert {row.source for row in loaded.train} == {config.data.name} == {name}
    assert {re.sub(r"\d", "", row.question) for row in loaded.train} == {f"{symbols}="}
    assert config.reward.components == {"exact": 1.0}


def test_more_problems_than_there_are_are_refused() -> None:
    with refused("data.products.problems", 8000, "at most 8100"):
        composed("data=products", "data.products.problems=8000")
