"""The measured numbers of the pages are those of the result files, and come from machines that were idle."""

import json
from pathlib import Path

import pytest

from tests.docs import measured
from tests.docs.markdown import PAGES, name

RESULTS = sorted(measured.RESULTS.glob("*.json"))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_measured_numbers_of_a_page_are_those_of_the_result_files(page: Path) -> None:
    assert page.read_text() == measured.rewritten(page.read_text()), "run: python -m tests.docs.measured"


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_no_result_comes_from_a_busy_machine(path: Path) -> None:
    assert json.loads(path.read_text()).get("busy", False) is False


def test_every_block_is_on_one_page() -> None:
    found = [match[2] for page in PAGES for match in measured.BLOCK.finditer(page.read_text())]
    assert sorted(found) == sorted(measured.BLOCKS)


def test_every_quoted_result_of_this_machine_says_that_it_was_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    quoted: dict[str, measured.Result] = {}
    load = measured.load
    monkeypatch.setattr(measured, "load", lambda stem: quoted.setdefault(stem, load(stem)))
    for render in measured.BLOCKS.values():
        render()

    assert {"trainer", "learning", "real_models"} <= quoted.keys()
    # In virtual time; arithmetic; on a card of its own.
    cards = {card.removesuffix(".json") for card in measured.CARDS}
    assert {stem for stem, result in quoted.items() if "busy" not in result} == {"overlap", "roofline", *cards}
