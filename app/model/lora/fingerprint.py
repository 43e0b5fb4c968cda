"""Fingerprint of a base model: adapters are only worth something on the weights that they were trained on.

Models of one family share all their shapes (Qwen3-4B and Qwen3-4B-Base), so shapes do not tell them apart. This needs
no torch, and reads a few megabytes of a model of any size.
"""

import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from app.errors import ConfigError

SAMPLE_BYTES = 4096  # of each tensor, from its beginning
LENGTH_BYTES = 8  # of the header's length, at the beginning of a safetensors file


def fingerprint(path: Path) -> str:
    """Return 16 hex digits of names, dtypes, shapes and first bytes of all tensors of a model directory.

    The division of the tensors into files does not matter.

    Raises:
        ConfigError: Its safetensors cannot be read.
    """
    try:
        samples = sorted(sample for file in path.glob("*.safetensors") for sample in _samples(file))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"model.path={path} is not accepted: give a directory whose safetensors can be read ({error})."
        ) from error

    digest = sha256()
    for description, content in samples:
        digest.update(description.encode() + content)
    return digest.hexdigest()[:16]


def _samples(file: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (name, dtype and shape; first bytes) of every tensor of a safetensors file."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(LENGTH_BYTES), "little")
        header = json.loads(opened.read(length))
        for name, tensor in header.items():
            if name == "__metadata__":
                continue
            start, end = tensor["data_offsets"]
            opened.seek(LENGTH_BYTES + length + start)
            yield f"{name} {tensor['dtype']} {tensor['shape']}", opened.read(min(SAMPLE_BYTES, end - start))
