"""Writes a trained policy as a Hugging Face directory that looks like the one it came from.

Always holds: tensors carry the source checkpoint's own names; what the source has and was not trained (a vision tower,
multi-token prediction) is copied, so that nothing is lost; a directory under its final name is complete.
"""

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from app.errors import RunError
from app.model.hf_checkpoint import Checkpoint, open_checkpoint

FILE_BYTES = 4 * 2**30  # a safetensors file is closed when it would grow beyond this
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def export(path_source: Path, state: Iterable[tuple[str, Tensor]], out: Path, dtype: torch.dtype | None = None) -> None:
    """Write `out` from the tensors of `state` (CPU, checkpoint names) and the directory `path_source`.

    `dtype` of the trained floating-point tensors; None keeps each one's dtype of the source. `state` is consumed one
    tensor at a time. Raises `RunError` when `out` exists and is not empty, or a tensor is unknown to the source.
    """
    if out.exists() and any(out.iterdir()):
        raise RunError(f"export to {out}: the directory is not empty")
    out.parent.mkdir(parents=True, exist_ok=True)
    writing = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        _copy_side_files(path_source, writing, dtype)
        with open_checkpoint(path_source) as source:
            _write(_all_tensors(state, source, dtype), writing)
        writing.chmod(0o755)  # mkdtemp's folder is the maker's alone
        writing.replace(out)
    finally:
        shutil.rmtree(writing, ignore_errors=True)


def _all_tensors(
    state: Iterable[tuple[str, Tensor]], source: Checkpoint, dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    trained = set()
    for name, tensor in state:
        if name not in source.names:
            raise RunError(f"export: {source.path} has no tensor named {name}")
        trained.add(name)
        kept = tensor.dtype if not tensor.is_floating_point() else dtype or source.dtype(name)
        yield name, tensor.detach().to(device="cpu", dtype=kept).contiguous()
    tied = _tied_head(source, trained)
    for name in sorted(source.names - trained - tied):
        yield name, source.read(name)


def _tied_head(source: Checkpoint, trained: set[str]) -> set[str]:
    """A copy of a tied head, which some checkpoints carry: it would be the untrained one."""
    config = json.loads((source.path / "config.json").read_text())
    tied = config.get("tie_word_embeddings", config.get("text_config", {}).get("tie_word_embeddings", False))
    return {name for name in source.names - trained if tied and name.endswith("lm_head.weight")}


def _write(tensors: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    from safetensors.torch import save_file

    files: list[list[str]] = []
    held: dict[str, Tensor] = {}
    total = held_bytes = 0

    def close() -> None:
        save_file(held, folder / f"part-{len(files)}", metadata={"format": "pt"})
        files.append(list(held))
        held.clear()

    for name, tensor in tensors:
        if held and held_bytes + tensor.nbytes > FILE_BYTES:
            close()
            held_bytes = 0
        held[name] = tensor
        held_bytes += tensor.nbytes
        total += tensor.nbytes
    close()
    _name_files(folder, files, total)


def _name_files(folder: Path, files: list[list[str]], total_bytes: int) -> None:
    if len(files) == 1:
        (folder / "part-0").rename(folder / SINGLE)
        return
    where: dict[str, str] = {}
    for number, names in enumerate(files):
        file = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        (folder / f"part-{number}").rename(folder / file)
        where |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(where.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _copy_side_files(source: Path, out: Path, dtype: torch.dtype | None) -> None:
    """Everything but weights: configuration, tokenizer, templates, code."""
    for file in sorted(source.iterdir()):
        if file.is_file() and file.suffix not in {".safetensors", ".bin", ".pt"} and not file.name.endswith(INDEX):
            shutil.copy(file, out / file.name)
    if dtype is not None:
        config = json.loads((out / "config.json").read_text())
        for part in (config, config.get("text_config")):
            if part is not None:
                part.pop("torch_dtype", None)
                part["dtype"] = str(dtype).removeprefix("torch.")
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
