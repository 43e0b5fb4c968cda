"""Rows of a function of the user."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.config.data import DataConfig
from app.data import rows, user_rows
from app.data.prompts import build
from tests.refusals import refused


def test_a_function_in_the_working_directory_yields_the_rows(
    write_module: Callable[[str], str], tokenizer: Any
) -> None:
    name = write_module(
        "def puzzles(limit, start=0):\n"
        "    for number in range(start, start + limit):\n"
        "        yield {'question': f'{number}+1=', 'answer': number + 1, 'level': 'easy'}\n"
    )
    config = DataConfig(name="mine", _target_=f"{name}.puzzles", args={"limit": 20}, shuffle=False)
    data = build(config, tokenizer, seed=0, max_prompt_tokens=16)
    assert data.counts.text == "19 training rows, 1 held-out row"
    first = next(data.train)
    assert (first.id, first.answer) == ("mine/0@0", "1")
    assert first.row == {"question": "0+1=", "answer": 1, "level": "easy"}


def test_every_failure_is_refused_with_its_place(
    write_module: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = write_module(
        "def fails():\n    yield {'question': 'q', 'answer': 'a'}\n    raise RuntimeError('disk\\ngone')\n"
        "def texts():\n    return ['q', 'a']\n"
        "def nothing():\n    return []\n"
        "def number():\n    return 7\n"
        "def takes(limit):\n    return []\n"
        "def endless():\n    while True:\n        yield {'question': 'q', 'answer': 'a'}\n"
        "def without():\n    return [{'question': 'q'}]\n"
    )
    monkeypatch.setattr(user_rows, "MAX_ROWS", 100)
    for target, *named in (
        ("fails", "RuntimeError: disk", f"{tmp_path / name}.py:3"),
        ("texts", "row 1 is a str"),
        ("nothing", "empty"),
        ("number", "a int"),
        ("takes", "'limit'"),
        ("endless", "100 rows"),
    ):
        with refused("data._target_", f"{name}.{target}", *named):
            rows.load(DataConfig(_target_=f"{name}.{target}"))
    with refused("data.answer", "answer", f"row 1 of {name}.without", "question"):
        rows.load(DataConfig(_target_=f"{name}.without"))
