"""Imports and trials of a user's code: what fails is named with the reason and its line."""

from collections.abc import Callable
from pathlib import Path

import pytest

from app.utils import user_code
from app.utils.user_code import LoadError, require, resolve
from tests.refusals import refused


@pytest.mark.parametrize(
    ("source", "path", "reason"),
    [
        ("", "no_such_module.reward", "no module no_such_module"),
        ("", "os.no_such_package.reward", "module os has no no_such_package.reward"),
        ("", "{module}.missing", "module {module} has no missing"),
        ("NUMBER = 3\n", "{module}.NUMBER", "not a function or class"),
        ("import no_such_library\n", "{module}.own", "No module named 'no_such_library'"),
        ("1 / 0\n", "{module}.own", "ZeroDivisionError: division by zero at {folder}/{module}.py:1"),
        ("def broken(:\n", "{module}.own", "SyntaxError: invalid syntax at {folder}/{module}.py:1"),
    ],
)
def test_a_path_that_cannot_be_imported_is_named_with_the_reason_and_its_line(
    source: str, path: str, reason: str, tmp_path: Path, write_module: Callable[[str], str]
) -> None:
    names = {"module": write_module(source), "folder": str(tmp_path)}
    with pytest.raises(LoadError) as failed:
        resolve(path.format(**names))
    assert reason.format(**names) in str(failed.value)


def test_a_function_is_returned_if_its_trial_finds_nothing_and_else_refused(write_module: Callable[[str], str]) -> None:
    path = f"{write_module('def own(limit): return limit')}.own"
    assert require("data._target_", path, "rows", lambda found: None)(3) == 3
    with refused("data._target_", path, "rows", "too few"):
        require("data._target_", path, "rows", lambda found: "too few")
    with refused("data._target_", path, "rows", "TypeError", "limit"):
        require("data._target_", path, "rows", lambda found: found())


def test_an_import_that_hangs_is_refused_at_a_deadline(
    write_module: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_code, "IMPORT_TIMEOUT_S", 0.2)
    path = f"{write_module('import threading; threading.Event().wait(30)')}.Tracker"
    with refused("tracking.use", path, "0.2 s"):
        require("tracking.use", path, "a class")
