"""The tables of docs/coming_from.md are those of the command line's answers, and name settings that exist."""

import re
from enum import Enum
from typing import Any

import pytest

from app.config.foreign_names import VALUE, answer, table
from app.config.run import RunConfig
from app.config.setting import settings
from tests.docs import coming_from_page
from tests.docs.markdown import ROOT

DECLARED = {each.key: each for each in settings(RunConfig)}
GROUPS = {each.name for each in (ROOT / "conf").iterdir()}
ROWS = [row for rows in table()["programs"].values() for row in rows]
NAMES = [name for row in ROWS for name in row["names"].split()]


def test_the_page_is_current() -> None:
    current = coming_from_page.PAGE.read_text(encoding="utf-8")
    assert current == coming_from_page.render(), "run: python -m tests.docs.coming_from_page"


def test_a_name_stands_once_and_is_no_setting_of_ours() -> None:
    known = [name.replace("-", "_") for name in NAMES]
    assert sorted(known) == sorted(set(known))
    assert not set(known) & DECLARED.keys()


def accepted(key: str, choice: str) -> bool:
    """Whether `key=choice` names a setting, or a preset, and one of its values where these have names."""
    if key == "hydra.run.dir" or choice.startswith("<"):
        return key in DECLARED or key in GROUPS or key == "hydra.run.dir"
    if key in GROUPS and (ROOT / f"conf/{key}/{choice}.yaml").exists():
        return True
    default = DECLARED[key].default
    return not isinstance(default, Enum) or choice in type(default).__members__


@pytest.mark.parametrize("row", ROWS, ids=[row["names"].split()[0] for row in ROWS])
def test_a_row_has_an_answer_with_settings_and_values_that_exist(row: dict[str, Any]) -> None:
    assert ("write" in row) != ("because" in row)
    choices = [str(each) for each in row.get("values", {}).values()] or [VALUE]
    for word in row.get("write", "").split():
        key, equals, written = word.partition("=")
        assert equals
        assert all(accepted(key, written.replace(VALUE, choice)) for choice in choices)
        named = [name for name in re.findall(r"[a-z_]+\.[a-z_]+", written) if "<" in written]
        assert set(named) <= DECLARED.keys()
    for name in row["names"].split():
        assert answer(name.replace("*", "anything"), "7") is not None
