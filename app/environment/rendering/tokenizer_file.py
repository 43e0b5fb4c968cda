"""A model directory's `tokenizer.json` through the `tokenizers` package, without transformers."""

import importlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def import_package(name: str) -> Any:
    """Import a package of the worker's interpreter. Raises `ValueError`, which names the interpreter."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        raise ValueError(
            f"{sys.executable} has no package {error.name}, which environments need: "
            f"install {package} there, or give another environment.python."
        ) from error


class TokenizerFile:
    """A tokenizer with the methods that the `renderers` package asks for. `backend`: the `tokenizers.Tokenizer`."""

    unk_token_id: int | None = None  # `convert_tokens_to_ids` returns None for what is missing

    def __init__(self, folder: Path) -> None:
        """Load a tokenizer. Raises `ValueError` if `tokenizer.json` cannot be read, or `tokenizers` is missing."""
        tokenizers = import_package("tokenizers")
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{folder} has no tokenizer.json, which environments need.")

        try:
            self.backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises no narrower type
            raise ValueError(f"{path} cannot be read as a tokenizer ({error}).") from error
        self.backend.no_truncation()
        self.backend.no_padding()

        self.name_or_path = str(folder)
        self.stop_ids = frozenset(stop_ids(folder))
        end_of_text = token_text(read_json(folder / "tokenizer_config.json").get("eos_token"))
        self.eos_token_id = None if end_of_text is None else self.convert_tokens_to_ids(end_of_text)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of `text`: [N]. A lone surrogate, which has no bytes, becomes a question mark."""
        readable = text.encode("utf-8", "replace").decode("utf-8")  # the same number of characters
        ids: list[int] = self.backend.encode(readable, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        text: str = self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def convert_tokens_to_ids(self, token: str) -> int | None:
        index: int | None = self.backend.token_to_id(token)
        return index


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object of a model directory, empty where there is no such file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON.") from error
    return found if isinstance(found, dict) else {}


def token_text(declared: Any) -> str | None:
    """Return the text of a special token as a model directory declares it: text, or an object with `content`."""
    text = declared.get("content") if isinstance(declared, dict) else declared
    return text if isinstance(text, str) else None


def stop_ids(folder: Path) -> list[int]:
    """Return the tokens that end a completion: those of the model's configuration, the only ones that engines know."""
    found: list[Any] = []
    for name in ("generation_config.json", "config.json"):
        stops = read_json(folder / name).get("eos_token_id")
        found += stops if isinstance(stops, list) else [stops]
    return [*dict.fromkeys(stop for stop in found if isinstance(stop, int))]
