"""The notebook: its commands compose, and its cells run inside a running event loop, as in a kernel."""

import ast
import html
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from app.errors import ConfigError
from tests.compose import composed
from tests.docs.markdown import ROOT

NOTEBOOK = ROOT / "docs" / "quickstart.ipynb"


def cells() -> list[dict[str, Any]]:
    return [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


def sources() -> list[str]:
    return ["".join(cell["source"]) for cell in cells()]


def printed(cell: dict[str, Any]) -> str:
    """What a cell shows in the file."""
    shown = [output.get("text") or output["data"]["text/plain"] for output in cell["outputs"]]
    return "".join("".join(lines) for lines in shown)


def test_the_site_shows_its_cells_and_outputs_as_a_page(tmp_path: Path) -> None:
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stderr
    text = html.unescape(re.sub(r"<[^>]+>", "", (site / "notebook" / "index.html").read_text()))
    for cell in cells():
        for line in ["".join(cell["source"]), printed(cell)]:
            assert line.strip().splitlines()[0] in text
    assert 'href="../notebook/"' in (site / "configuration" / "index.html").read_text()
    assert (site / NOTEBOOK.name).read_bytes() == NOTEBOOK.read_bytes()


def test_its_commands_compose_or_are_refused_as_shown() -> None:
    run, *_, refused = (
        ast.literal_eval(node.args[0])
        for source in sources()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "app.run"
    )
    assert composed(*run).steps == 3
    with pytest.raises(ConfigError) as error:
        composed(*refused)
    assert printed(cells()[-1]) == f"{error.value}\nConfigError\n"


def test_every_cell_has_its_output() -> None:
    assert [bool(printed(cell)) for cell in cells()] == [True] * 4
    assert "/" + "tmp" not in NOTEBOOK.read_text()


@pytest.mark.slow
async def test_its_cells_run_in_a_running_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shell = InteractiveShell()

    results: list[Any] = []
    for source in sources():
        done = await shell.run_cell_async(source, transformed_cell=shell.transform_cell(source))
        done.raise_error()
        results.append(done.result)
    _, summary, steps, _ = results
    assert (summary["status"], summary["steps"]) == ("finished", 3)
    assert 0 <= summary["eval/accuracy_first"] <= 1
    assert [step for step, _, _ in steps] == [1, 2, 3]
    assert all(0 <= reward <= 1 and tokens > 0 for _, reward, tokens in steps)
    assert len(list((tmp_path / "outputs").glob("*/*/report.html"))) == 1
