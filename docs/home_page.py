"""Hook of mkdocs: the home page of the site is README."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add README as the home page, with links relative to the site; what is outside of it is named without a link."""
    text = (Path(config.docs_dir).parent / "README.md").read_text(encoding="utf-8")
    text = text.replace("](docs/", "](").replace('"docs/', '"')
    files.append(File.generated(config, "index.md", content=re.sub(r"\[(\w+\.md)\]\(\1\)", r"`\1`", text)))
    return files
