"""Hook of mkdocs: renders the notebook as a page of the site. The notebook is beside it, to download."""

import json
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

NOTEBOOK, PAGE = "quickstart.ipynb", "notebook.md"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page."""
    notebook = json.loads((Path(config.docs_dir) / NOTEBOOK).read_text(encoding="utf-8"))
    files.append(File.generated(config, PAGE, content="\n\n".join(map(cell, notebook["cells"])) + "\n"))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Lead links to the notebook, which repositories render, to the page."""
    return markdown.replace(f"({NOTEBOOK})", f"({PAGE})")


def cell(content: dict[str, Any]) -> str:
    """Return a cell as Markdown: its code, then what it prints or returns."""
    source = "".join(content["source"])
    if content["cell_type"] == "markdown":
        return source
    outputs = ["".join(each.get("text") or each["data"]["text/plain"]) for each in content["outputs"]]
    return "\n\n".join([f"```python\n{source}\n```", *[f"```text\n{each.rstrip()}\n```" for each in outputs]])
