"""Tensors of a checkpoint on disk, and their names in the model.

Invariants:
- Tensors are read by slice, so that a rank reads its own rows only.
- Checkpoint names are kept alongside model names. Engines and exports use the former; transformers' text-only classes
  rename keys.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.errors import ConfigError
from app.model.lora.base_weights import weight_map

# (prefix in the model, prefix in the checkpoint); the first match is used.
RENAMED = (
    ("", ""),
    ("model.", "model.language_model."),  # Qwen3.5: text model inside the vision-language checkpoint
    ("model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
    ("base_model.model.model.", "base_model.model.model.language_model."),  # PEFT's adapters of the former
)
MAX_NAMES = 5  # tensor names per error message


class Checkpoint:
    """Open safetensors files of a model directory."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        from safetensors import safe_open

        self.path = path
        self._files: dict[str, Any] = {}
        for file, names in weight_map(path).items():
            opened = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
            self._files |= {name: opened for name in opened.keys() if names is None or name in names}  # noqa: SIM118 - no iterable

    @property
    def names(self) -> set[str]:
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading its data."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor, without reading its data unless it is a scalar."""
        return self._files[name].get_slice(name)[:0].dtype if self.shape(name) else self.read(name).dtype

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """Read a tensor, or some of its rows, in the dtype of the checkpoint."""
        file = self._files[name]
        return file.get_tensor(name) if rows is None else file.get_slice(name)[rows]


@contextmanager
def open_checkpoint(path: Path, key: str = "model.path") -> Iterator[Checkpoint]:
    """Open a directory that `key` names. Raises `ConfigError` if its safetensors cannot be read."""
    from safetensors import SafetensorError

    with ExitStack() as stack:
        try:
            yield Checkpoint(path, stack)
        except SafetensorError as error:
            accepted = "a directory whose safetensors can be read"
            raise ConfigError(key, path, accepted, str(error)) from error


def match(
    expected: Mapping[str, tuple[int, ...]],
    checkpoint: Checkpoint,
    *,
    ignored: Iterable[str] = (),
    tied: Iterable[str] = (),
    key: str = "model.path",
    accepted: str = "a checkpoint that matches its config.json",
) -> dict[str, str]:
    """Map every expected tensor of the model to its name in the checkpoint.

    Args:
        expected: Shapes by model name.
        ignored: Regular expressions for further names that the checkpoint may have.
        tied: Model names that share the tensor of another one.
        key: The setting that names the checkpoint, for messages.
        accepted: A valid checkpoint in words, for messages.

    Raises:
        ConfigError: If tensors are missing, unexpected, or of another shape.
    """
    names = checkpoint.names
    candidates = {name: stored_name(name, names) for name in expected}
    matched = {name: stored for name, stored in candidates.items() if stored is not None}
    aliases = {stored_name(name, names) for name in tied}

    missing = [name for name in expected if name not in matched]
    patterns = [re.compile(pattern) for pattern in ignored]
    spare = names - set(matched.values()) - aliases
    unexpected = sorted(name for name in spare if not any(pattern.search(name) for pattern in patterns))
    misshapen = [
        f"{stored} {checkpoint.shape(stored)} instead of {expected[name]}"
        for name, stored in matched.items()
        if checkpoint.shape(stored) != expected[name]
    ]

    problems = {"lacks": missing, "also has": unexpected, "has in another shape": misshapen}
    described = [f"{verb} {_shorten(tensors)}" for verb, tensors in problems.items() if tensors]
    if described:
        raise ConfigError(key, checkpoint.path, accepted, f"this one {' and '.join(described)}")
    return matched


def stored_name(name: str, names: set[str]) -> str | None:
    """Return the name in a checkpoint of a tensor of the model; None if none of the checkpoint's `names` is it."""
    candidates = (theirs + name.removeprefix(ours) for ours, theirs in RENAMED if name.startswith(ours))
    return next((candidate for candidate in candidates if candidate in names), None)


def _shorten(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more
