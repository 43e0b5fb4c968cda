"""A reader of the pages."""

import sys
from pathlib import Path

import pytest

from tests.docs.markdown import PAGES, code_blocks


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a reader who copied every Python block of the pages into the file that it names."""
    for language, text in (block for page in PAGES for block in code_blocks(page)):
        title = text.partition("\n")[0].removeprefix("# ")
        if language == "python" and title.endswith(".py"):
            with (tmp_path / title).open("a") as file:
                file.write(text)
            monkeypatch.delitem(sys.modules, title.removesuffix(".py"), raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path
