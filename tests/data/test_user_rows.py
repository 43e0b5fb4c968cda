"""Rows of a function of the user."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.config.data import DataConfig
from app.data import rows, user_rows
from app.data.build import build
from app.errors import ConfigError


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Write a module into the working directory and return its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    names = []

    def write(source: str) -> str:
        name = f"own_rows_{len(names)}_{tmp_path.name}"
        names.append(name)
        (tmp_path / f"{name}.py").write_text(source)
        return name

    yield write
    for name in names:
        sys.modules.pop(name, None)


def error_of(config: DataConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        rows.load(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_function_in_the_working_directory_yields_the_rows(module, tokenizer) -> None:
    name = module(
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


def test_a_returned_list_and_a_class_work_too(module) -> None:
    name = module(
        "ROWS = [{'question': 'q', 'answer': 'a'}] * 4\n"
        "def listed():\n    return ROWS\n"
        "class Rows:\n    def __iter__(self):\n        return iter(ROWS)\n"
    )
    for target in ("listed", "Rows"):
        assert len(rows.load(DataConfig(_target_=f"{name}.{target}")).train) == 3


def test_values_of_numpy_become_json_values_and_bytes_are_left_out(module, tokenizer) -> None:
    name = module(
        "import numpy as np\n"
        "def rows():\n"
        "    row = {'question': 'q', 'answer': np.int64(7), 'scores': np.array([0.5, 1]), 'p': np.float64(0.25)}\n"
        "    return [{**row, 3: True, 'image': b'PNG'}] * 2\n"
    )
    data = build(DataConfig(_target_=f"{name}.rows"), tokenizer, seed=0, max_prompt_tokens=16)
    prompt = next(data.train)
    assert prompt.answer == "7"
    assert prompt.row == {"question": "q", "answer": 7, "scores": [0.5, 1.0], "p": 0.25, "3": True}
    assert [type(value) for value in prompt.row.values()] == [str, int, list, float, bool]


def test_a_resumed_run_must_get_the_same_rows(module, tokenizer) -> None:
    name = module("def some(last):\n    return [{'question': f'{n}+{last}', 'answer': 'a'} for n in range(4)]\n")

    def cursor_of(last: int):
        config = DataConfig(_target_=f"{name}.some", args={"last": last})
        return build(config, tokenizer, seed=0, max_prompt_tokens=16).train

    saved = cursor_of(4)
    saved.take(2)
    restored = cursor_of(4)
    restored.restore(saved.state())
    with pytest.raises(ConfigError, match=r"^data does not match the checkpoint: give the same rows"):
        cursor_of(5).restore(saved.state())


def test_every_failure_is_one_sentence_with_its_place(module, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = module(
        "def fails():\n    yield {'question': 'q', 'answer': 'a'}\n    raise RuntimeError('disk\\ngone')\n"
        "def texts():\n    return ['q', 'a']\n"
        "def nothing():\n    return []\n"
        "def number():\n    return 7\n"
        "def takes(limit):\n    return []\n"
        "def endless():\n    while True:\n        yield {'question': 'q', 'answer': 'a'}\n"
        "def without():\n    return [{'question': 'q'}]\n"
    )
    monkeypatch.setattr(user_rows, "MOST_ROWS", 100)
    for target, sentence in (
        ("fails", f"give a function that returns rows; it failed (RuntimeError: disk at {tmp_path / name}.py:3)."),
        ("texts", "give a function that returns dictionaries; row 1 is a str."),
        ("nothing", "give a data set with rows; this one is empty."),
        ("number", "give a function that returns or yields rows; it returned a int."),
        ("takes", "give a function that takes data.args={} (missing a required argument: 'limit')."),
        ("endless", "give a function that ends; it yielded more than 100 rows."),
        ("absent", f"give a function that can be imported; module {name} has no absent."),
    ):
        path = f"{name}.{target}"
        assert error_of(DataConfig(_target_=path)) == f"data._target_={path} is not accepted: {sentence}"
    assert error_of(DataConfig(_target_=f"{name}.without")) == (
        f"data.answer=answer is not accepted: give a field of the rows; row 1 of {name}.without has only question."
    )


def test_a_module_that_cannot_be_imported_is_named_with_its_line(module, tmp_path: Path) -> None:
    name = module("x = 1\nraise ValueError('bad table')\n")
    expected = f"module {name} cannot be imported (ValueError: bad table at {tmp_path / name}.py:2)."
    assert error_of(DataConfig(_target_=f"{name}.rows")).endswith(expected)
