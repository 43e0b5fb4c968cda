"""A base model's weights, read from safetensors headers: their fingerprint, and which layers can have adapters.

Needs no torch, and reads a few megabytes of a model of any size.
"""

import json
from collections.abc import Container, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from app.config.model import ALL_LINEAR, LoraConfig
from app.config.peft_adapter import LENGTH_BYTES
from app.errors import ConfigError, expect
from app.model.lora.targets import DECAYS, check_targets

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SAMPLE_BYTES = 4096  # of each tensor, from its beginning
LAYERS, WEIGHT, NESTED, PEFT_PREFIX = ".layers.", ".weight", "language_model.", "base_model.model."


@dataclass(frozen=True, slots=True, order=True)
class StoredTensor:
    """A tensor's entry in a header, and its first bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sample: bytes


def weight_map(path: Path) -> dict[Path, Container[str] | None]:
    """Return the files with the weights of a model directory, and the tensors that count in each; None: all.

    An index names them, as transformers and engines read it. Other files beside it are stale shards, or the same
    weights under other names (`consolidated.safetensors` of Mistral's repositories).

    Raises:
        ConfigError: The index cannot be read, or a file that it names is missing.
    """
    index = path / INDEX
    if not index.is_file():
        single = path / SINGLE
        return dict.fromkeys([single] if single.is_file() else sorted(path.glob("*.safetensors")))
    try:
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        found: dict[Path, Container[str] | None] = {
            path / file: {name for name, each in files.items() if each == file} for file in sorted({*files.values()})
        }
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError("model.path", path, f"a directory whose {INDEX} can be read", str(error)) from error
    missing = next((file.name for file in found if not file.is_file()), None)
    expect(missing is None, "model.path", path, f"a directory with all files of its {INDEX}; this one has no {missing}")
    return found


def fingerprint(path: Path) -> str:
    """Return 16 hex digits of names, dtypes, shapes and first bytes of all tensors of a model directory.

    Models of one family share all their shapes (Qwen3-4B and Qwen3-4B-Base), but adapters are only worth something on
    the weights that they were trained on. The division of the tensors into files does not matter.

    Raises:
        ConfigError: Its safetensors cannot be read.
    """
    digest = sha256()
    for tensor in sorted(_stored(path)):
        digest.update(f"{tensor.name} {tensor.dtype} {tensor.shape}".encode() + tensor.sample)
    return digest.hexdigest()[:16]


def require_targets(path: Path, lora: LoraConfig) -> None:
    """Raise `ConfigError` if a target of the adapters, or a layer of `lora.path`, is not in this model.

    Adapters that lack layers are refused when they are loaded.
    """
    if lora.path is not None:
        shapes = {each.name.replace(NESTED, ""): each.shape for each in _stored(path)}
        for tensor in _stored(Path(lora.path).expanduser()):
            layer, _, matrix = tensor.name.replace(NESTED, "").removeprefix(PEFT_PREFIX).rpartition(".lora_")
            side = int(matrix.startswith("A"))  # A [r, in], B [out, r]
            fits = tensor.shape[side : side + 1] == shapes.get(layer + WEIGHT, ())[side : side + 1] != ()
            accepted = f"an adapter of model.path; its {tensor.name} {[*tensor.shape]} is of another model"
            expect(fits, "model.lora.path", lora.path, accepted)
    if lora.targets != [ALL_LINEAR]:
        layers = [each.name for each in _stored(path) if LAYERS in each.name and len(each.shape) == 2]
        check_targets(lora.targets, {name.removesuffix(WEIGHT).rpartition(".")[2] for name in layers} - {*DECAYS})


def has_own_head(path: Path) -> bool:
    """Whether a model directory has the head that drafts tokens; transformers leaves it out of what it saves."""
    return any(tensor.name.startswith("mtp.") for tensor in _stored(path))


def _stored(path: Path) -> Iterator[StoredTensor]:
    try:
        for file, names in weight_map(path).items():
            yield from (tensor for tensor in _in_file(file) if names is None or tensor.name in names)
    except (OSError, ValueError, KeyError) as error:
        accepted = "a directory whose safetensors can be read"
        raise ConfigError("model.path", path, accepted, str(error)) from error


def _in_file(file: Path) -> Iterator[StoredTensor]:
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(LENGTH_BYTES), "little")
        header = json.loads(opened.read(length))
        for name, tensor in header.items():
            if name == "__metadata__":
                continue
            start, end = tensor["data_offsets"]
            opened.seek(LENGTH_BYTES + length + start)
            sample = opened.read(min(SAMPLE_BYTES, end - start))
            yield StoredTensor(name, tensor["dtype"], tuple(tensor["shape"]), sample)
