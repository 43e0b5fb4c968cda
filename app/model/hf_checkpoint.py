"""A checkpoint on disk: which tensors it has, under which names, and how they are called in the model.

Always holds: what is read is read by slice, so that a rank touches only its own rows; the checkpoint's own names are
kept beside the model's, since engines and exports speak the former (transformers' text-only classes rename keys).
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.errors import ConfigError

SAFETENSORS = "*.safetensors"
# (start of the model's name, start of the checkpoint's name), the first that fits a checkpoint is used
RENAMED = (
    ("", ""),
    ("model.", "model.language_model."),  # Qwen3.5: the text model within the vision-language checkpoint
    ("model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
)
SHOWN = 5  # tensor names in an error message


class Checkpoint:
    """The safetensors of a model directory, open for reading."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        from safetensors import safe_open

        self.path = path
        self._files: dict[str, Any] = {}
        for file in sorted(path.glob(SAFETENSORS)):
            opened = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
            self._files |= dict.fromkeys(opened.keys(), opened)

    @property
    def names(self) -> set[str]:
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        return self._files[name].get_slice(name)[:0].dtype if self.shape(name) else self.read(name).dtype

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """A tensor in the checkpoint's dtype, or some rows of it."""
        file = self._files[name]
        return file.get_tensor(name) if rows is None else file.get_slice(name)[rows]


@contextmanager
def open_checkpoint(path: Path) -> Iterator[Checkpoint]:
    from safetensors import SafetensorError

    with ExitStack() as stack:
        try:
            yield Checkpoint(path, stack)
        except SafetensorError as error:
            raise ConfigError(
                f"model.path={path} is not accepted: give a directory whose safetensors can be read ({error})."
            ) from error


def match(
    wanted: Mapping[str, tuple[int, ...]], checkpoint: Checkpoint, *, ignored: Iterable[str], tied: Iterable[str]
) -> dict[str, str]:
    """The checkpoint's name of every wanted tensor (given with its shape).

    `ignored` are patterns of names that the checkpoint may have besides, `tied` names of the model that share another
    one's tensor. Raises `ConfigError` naming what is missing, left over or of another shape.
    """
    names = checkpoint.names
    found = {name: match for name in wanted if (match := _in_checkpoint(name, names))}
    aliases = {match for name in tied if (match := _in_checkpoint(name, names))}
    patterns = [re.compile(pattern) for pattern in ignored]
    missing = [name for name in wanted if name not in found]
    spare = names - set(found.values()) - aliases
    unexpected = sorted(name for name in spare if not any(pattern.search(name) for pattern in patterns))
    misshapen = [
        f"{found[name]} {checkpoint.shape(found[name])} for {shape}"
        for name, shape in wanted.items()
        if name in found and checkpoint.shape(found[name]) != shape
    ]
    wrong = {"lacks": missing, "also has": unexpected, "has in another shape": misshapen}
    said = [f"{what} {_some(which)}" for what, which in wrong.items() if which]
    if said:
        raise ConfigError(
            f"model.path={checkpoint.path} is not accepted: give a checkpoint that fits its own config.json; this "
            f"one {' and '.join(said)}."
        )
    return found


def _in_checkpoint(name: str, names: set[str]) -> str | None:
    candidates = (theirs + name.removeprefix(ours) for ours, theirs in RENAMED if name.startswith(ours))
    return next((candidate for candidate in candidates if candidate in names), None)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
