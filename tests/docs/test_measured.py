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
