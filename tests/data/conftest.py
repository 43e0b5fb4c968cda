"""A character tokenizer, and data files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def tokenizer() -> Any:
    """That of the tiny models: one token per character."""
    from tests.tiny_models.tokenizer import build_tokenizer

    return build_tokenizer(4096)


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., str]:
    """Write rows (or verbatim lines of text) to a file and return its path."""

    def write(*rows: Any, name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return str(path)

    return write
