"""`state.json` of a checkpoint: the driver's share, and the size and checksum of every file.

    {"format": 2, "step": 20, "version": 20, "extra": {…}, "model": {…}, "accuracy": 0.93, "evaluation_due": false,
     "files": {"__0_0.distcp": {"bytes": 4096, "crc32": 305419896}, …}, "crc32": 2596996162}

The last `crc32` is that of state.json without it.
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from app.config.model import LoraConfig
from app.errors import CheckpointError, DamagedCheckpoint
from app.utils import files

STATE = "state.json"
FORMAT = 2


@dataclass(frozen=True, slots=True)
class RunState:
    """The driver's share of a checkpoint. JSON-serializable."""

    step: int  # finished steps
    version: int  # policy version
    extra: Mapping[str, Any] = field(default_factory=dict)  # the caller's: prompt cursor, unfinished prompts, …
    model: Mapping[str, Any] = field(default_factory=dict)  # `app.model.hf_directory.identity` of the source model
    accuracy: float | None = None  # `eval/accuracy` of this step; None if it was not evaluated
    evaluation_due: bool = False  # the run ended before the evaluation of this step: a resume begins with it

    def owes_evaluation(self, last_step: int) -> bool:
        """Whether this step is yet to be evaluated, in a run that now ends with `last_step`."""
        return self.evaluation_due or (self.accuracy is None and self.step >= last_step)


@dataclass(frozen=True, slots=True)
class _StoredFile:
    bytes: int
    crc32: int


def write_state(folder: Path, state: RunState, checksums: Mapping[str, int]) -> None:
    """Write state.json beside the files of a checkpoint, and flush it to disk.

    Args:
        checksums: CRC-32 of every other file, by name.
    """
    stored = {name: _StoredFile((folder / name).stat().st_size, crc32) for name, crc32 in sorted(checksums.items())}
    with files.ChecksumWriter(folder / STATE) as stream:
        stream.write(_text(state, stored).encode())


def set_accuracy(path: Path, accuracy: float) -> None:
    """Write the accuracy of a step that was evaluated after its checkpoint was saved. Raises like `read_state`."""
    state, stored = _read(path)
    text = _text(replace(state, accuracy=accuracy, evaluation_due=False), stored)
    files.replace_file(path / STATE, text, durable=True)


def read_state(path: Path) -> RunState:
    """Read the driver's share of a checkpoint, and check that all its files are there with their sizes.

    Raises:
        DamagedCheckpoint: state.json is missing or damaged, or a file is missing or has another size.
        CheckpointError: The checkpoint has a format that this version does not read.
    """
    return _read(path)[0]


def read_intact(path: Path) -> RunState:
    """Like `read_state`, and read every file to compare its checksum."""
    state, stored = _read(path)
    try:
        found = files.crc32_of([path / name for name in stored])
    except OSError as error:
        raise DamagedCheckpoint(f"checkpoint {path} cannot be read: {files.describe(error)}") from error

    for (name, file), crc32 in zip(stored.items(), found, strict=True):
        if crc32 != file.crc32:
            differs = f"{name} has checksum {crc32:08x} instead of {file.crc32:08x}"
            raise DamagedCheckpoint(f"checkpoint {path} is damaged: {differs}")
    return state


def require_model(state: RunState, model: Mapping[str, Any], path: Path) -> None:
    """Raise `CheckpointError` unless the checkpoint at `path` is of this model, wherever its source is."""
    trained, ours = lora_of(state), LoraConfig(**model.get("lora", {}))
    if trained != ours:
        written = f"checkpoint {path} was written with model.lora={trained}"
        raise CheckpointError(f"{written}, and this run has model.lora={ours}")

    unknown = {"weights", "tokenizer"} - state.model.keys()  # of a checkpoint of an earlier version
    for key in sorted((model.keys() | state.model.keys()) - {"lora", "source", *unknown}):
        if model.get(key) != state.model.get(key):
            difference = f"its {key} is {state.model.get(key)!r:.80}, this model's is {model.get(key)!r:.80}"
            sources = f"in {model.get('source')}, which was {state.model.get('source')}"
            raise CheckpointError(f"checkpoint {path} is of another model: {difference} ({sources})")


def lora_of(state: RunState) -> LoraConfig:
    """Return the settings of the adapters that a checkpoint holds; their rank is 0 if it holds all weights."""
    return LoraConfig(**state.model.get("lora", {}))


def _read(path: Path) -> tuple[RunState, dict[str, _StoredFile]]:
    try:
        state, stored = _parse(path, json.loads((path / STATE).read_text(encoding="utf-8")))
    except OSError as error:
        raise DamagedCheckpoint(f"checkpoint {path} cannot be read: {files.describe(error)}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"checkpoint {path} cannot be read: {STATE} is damaged ({error})") from error

    for name, file in stored.items():
        try:
            found = (path / name).stat().st_size
        except OSError:
            raise DamagedCheckpoint(f"checkpoint {path} is incomplete: {name} is missing") from None
        if found != file.bytes:
            differs = f"{name} has {found} bytes instead of {file.bytes}"
            raise DamagedCheckpoint(f"checkpoint {path} is incomplete: {differs}")
    return state, stored


def _parse(path: Path, body: dict[str, Any]) -> tuple[RunState, dict[str, _StoredFile]]:
    """Convert the content of state.json. Raises what reading a damaged one may raise."""
    found = body["format"]
    if found != FORMAT:
        raise CheckpointError(f"checkpoint {path} has format {found}; this version reads format {FORMAT}")
    if body.pop("crc32") != _crc32(body):
        raise ValueError("its checksum is another one")

    del body["format"]
    stored = {name: _StoredFile(**value) for name, value in body.pop("files").items()}
    return RunState(**body), stored


def _text(state: RunState, stored: Mapping[str, "_StoredFile"]) -> str:
    body = {"format": FORMAT, **asdict(state), "files": {name: asdict(file) for name, file in stored.items()}}
    body["crc32"] = _crc32(body)
    return json.dumps(body, indent=1) + "\n"


def _crc32(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body).encode())
