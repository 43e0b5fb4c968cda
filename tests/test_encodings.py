"""Files are UTF-8 whatever the locale is: `zh_CN.GB18030` is common on clusters, and model files are in UTF-8.

A terminal need not be: characters that it lacks end nothing.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
METHODS = ("read_text", "write_text")


def without_encoding(tree: ast.AST) -> Iterator[int]:
    """Yield the lines of calls that read or write text in the locale's encoding."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        given = {each.arg: each.value for each in node.keywords}
        method = isinstance(node.func, ast.Attribute)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        of = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        inside = [each for value in (*node.args, *given.values()) for each in ast.walk(value)]
        modes = [each.value for each in inside if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        binary = any("b" in mode and set(mode) <= set("rwaxb+") for mode in modes)

        opens = name == "open" and of not in ("os", "gzip") and (not method or not node.args or bool(modes))
        text = isinstance(given.get("text"), ast.Constant) and bool(ast.literal_eval(given["text"]))
        if "encoding" not in given and (name in METHODS or (opens and not binary) or text):
            yield node.lineno


def test_the_application_reads_and_writes_text_as_utf8() -> None:
    files = [*(ROOT / "app").rglob("*.py"), *(ROOT / "launch").glob("*.py")]
    assert len(files) > 200
    found = [
        f"{file.relative_to(ROOT)}:{line}"
        for file in files
        for line in without_encoding(ast.parse(file.read_text(encoding="utf-8")))
    ]
    assert found == []


@pytest.mark.parametrize("option", ["--help", "mode=plan"])
def test_characters_that_the_terminal_lacks_end_nothing(option: str) -> None:
    """With `→` in what is printed."""
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run([sys.executable, "-m", "app", option], env=environment, cwd=ROOT, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode("latin-1")
