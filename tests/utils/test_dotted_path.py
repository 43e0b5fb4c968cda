"""Why a dotted path cannot be imported."""

from pathlib import Path

import pytest

from app.utils.dotted_path import LoadError, resolve


@pytest.mark.parametrize(
    ("source", "path", "reason"),
    [
        ("", "no_such_module.reward", "there is no module no_such_module (searched the working directory and"),
        ("", "os.no_such_package.reward", "module os has no no_such_package.reward"),
        ("", "{module}.missing", "module {module} has no missing"),
        ("NUMBER = 3\n", "{module}.NUMBER", "it is not a function or class"),
        ("import no_such_library\n", "{module}.own", "needs a module that is missing (No module named 'no_such"),
        (
            "1 / 0\n",
            "{module}.own",
            "(ZeroDivisionError: division by zero at {folder}/{module}.py:1)",
        ),
        (
            "def broken(:\n",
            "{module}.own",
            "(SyntaxError: invalid syntax at {folder}/{module}.py:1)",
        ),
    ],
)
def test_what_cannot_be_imported_is_named_with_the_reason_and_its_line(
    source: str, path: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"module": f"own_{tmp_path.name}", "folder": str(tmp_path)}
    (tmp_path / f"{names['module']}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(LoadError) as refused:
        resolve(path.format(**names))
    assert reason.format(**names) in str(refused.value)
