"""The tables of docs/coming_from.md agree with the answers of the command line."""

import re

import pytest

from app.config.foreign_names import answer
from app.config.run import RunConfig
from app.config.setting import settings
from tests.docs.markdown import ROOT

NAMED = re.compile(r"`([^`]+)`")


def rows() -> list[tuple[str, str]]:
    """The first two cells of every row on another program's settings."""
    text = (ROOT / "docs/coming_from.md").read_text()
    tables = text.partition("## TRL")[2].partition("## What is not here")[0]
    cells = [line.split(" | ") for line in tables.splitlines() if line.startswith("| `")]
    return [(each[0], each[1]) for each in cells]


@pytest.mark.parametrize(("theirs", "ours"), rows())
def test_the_command_line_answers_a_row_with_one_of_its_settings(theirs: str, ours: str) -> None:
    counterparts = set(NAMED.findall(ours))
    names = {each.key for each in settings(RunConfig)}
    for name in NAMED.findall(theirs):
        if name in names:
            assert name in counterparts
            continue
        written = {word.partition("=")[0] for word in (answer(name) or "").split()}
        assert written & counterparts, (name, written)


def test_every_setting_on_the_page_exists() -> None:
    names = {each.key for each in settings(RunConfig)} | {"hydra.run.dir", "tracking", "algorithm", "placement"}
    for _, ours in rows():
        assert set(NAMED.findall(ours)) <= names
