"""Generated products and chains: their answers, their splits, and the presets that select them."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from app.config.data import ChainConfig, ProductsConfig
from app.data import rows
from app.data.generators import chain, products
from tests.compose import composed
from tests.refusals import refused


def test_the_answer_is_the_product_of_two_factors_with_two_digits() -> None:
    train, held_out = products(ProductsConfig(problems=8000, eval_problems=100))
    assert (len(train), len(held_out)) == (8000, 100)
    for row in train + held_out:
        ((left, right),) = re.findall(r"^([1-9]\d)\*([1-9]\d)=$", row.question)
        assert row.answer == str(int(left) * int(right))
    assert len({row.question for row in train + held_out}) == 8100


def test_the_answer_of_a_chain_is_the_product_plus_the_last_number() -> None:
    train, held_out = chain(ChainConfig(problems=900, eval_problems=100))
    for row in train + held_out:
        left, right, addend = map(int, *re.findall(r"^([1-9]\d)\*([2-9])\+([1-9]\d)=$", row.question))
        assert row.answer == str(left * right + addend)
    assert len({row.question for row in train + held_out}) == 1000
    assert len({row.index for row in train + held_out}) == 1000


@pytest.mark.parametrize(
    ("draw", "config", "first"),
    [(products, ProductsConfig(), "86*87="), (chain, ChainConfig(), "86*8+90=")],
    ids=["products", "chain"],
)
def test_every_run_has_the_same_problems(draw: Callable[[Any], Any], config: object, first: str) -> None:
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
    composed("data=products", "data.products.problems=8000", "data.products.eval_problems=100")
