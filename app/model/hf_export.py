"""Export a trained policy as a Hugging Face directory with the layout of its source.

Invariants:
- Tensors have the names of the source checkpoint, adapters those of PEFT.
- Untrained tensors of the source (a vision tower, multi-token prediction) are copied.
- What a failure leaves is incomplete: callers write under another name first.
"""

import json
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.config.peft_adapter import CONFIG as ADAPTER_CONFIG
from app.config.peft_adapter import WEIGHTS as ADAPTER
from app.errors import RunError
from app.model.hf_checkpoint import Checkpoint, open_checkpoint
from app.model.lora.base_weights import INDEX, SINGLE

FILE_BYTES = 4 * 2**30  # largest safetensors file, unless a single tensor is larger


def export_adapter(adapters: dict[str, Tensor], config: dict[str, Any], out: Path) -> None:
    """Write adapters, by PEFT's names, and the content of their `adapter_config.json` to a new directory."""
    from safetensors.torch import save_file

    out.mkdir()
    save_file(adapters, out / ADAPTER, metadata={"format": "pt"})
    (out / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    _grant_by_umask(out)


def export(source: Path, state: Iterable[tuple[str, Tensor]], out: Path, dtype: torch.dtype | None = None) -> None:
    """Write a model directory.

    Args:
        source: Directory of the initial model, which provides all other files and tensors.
        state: Trained tensors by checkpoint name, consumed one at a time.
        out: Directory to create.
        dtype: Dtype of the trained floating-point tensors; None keeps the source's dtype of each tensor.

    Raises:
        RunError: The source has no tensor of a trained name.
    """
    out.mkdir(parents=True)
    _copy_side_files(source, out, dtype)
    with open_checkpoint(source) as checkpoint:
        _write(_all_tensors(state, checkpoint, dtype), out)
    _grant_by_umask(out)


def _grant_by_umask(folder: Path) -> None:
    """Let a server of another user read the model as far as the umask does: safetensors writes for the owner only."""
    mode = stat.S_IMODE(folder.stat().st_mode) & 0o666
    for file in folder.iterdir():
        file.chmod(mode)


def _all_tensors(
    state: Iterable[tuple[str, Tensor]], source: Checkpoint, dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    trained = set()
    for name, tensor in state:
        if name not in source.names:
            raise RunError(f"export: {source.path} has no tensor named {name}")
        trained.add(name)
        written_dtype = tensor.dtype if not tensor.is_floating_point() else dtype or source.dtype(name)
        yield name, tensor.detach().to(device="cpu", dtype=written_dtype).contiguous()

    # Some checkpoints store a copy of a tied head: its values are untrained.
    config = json.loads((source.path / "config.json").read_text(encoding="utf-8"))
    tied = config.get("tie_word_embeddings", config.get("text_config", {}).get("tie_word_embeddings", False))
    for name in sorted(source.names - trained):
        if not (tied and name.endswith("lm_head.weight")):
            yield name, source.read(name)


def _write(tensors: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Write files of up to `FILE_BYTES`, whose final names contain their number."""
    from safetensors.torch import save_file

    files: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    pending_bytes = 0
    total_bytes = 0

    def flush() -> None:
        save_file(pending, folder / f"{len(files)}.tmp", metadata={"format": "pt"})
        files.append(list(pending))
        pending.clear()

    for name, tensor in tensors:
        if pending and pending_bytes + tensor.nbytes > FILE_BYTES:
            flush()
            pending_bytes = 0
        pending[name] = tensor
        pending_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
    flush()

    if len(files) == 1:
        (folder / "0.tmp").rename(folder / SINGLE)
        return

    weight_map: dict[str, str] = {}
    for number, names in enumerate(files):
        file = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        (folder / f"{number}.tmp").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _copy_side_files(source: Path, out: Path, dtype: torch.dtype | None) -> None:
    """Copy everything except weights: configuration, tokenizer, templates, code."""
    for file in sorted(source.iterdir()):
        if file.is_file() and file.suffix not in {".safetensors", ".bin", ".pt"} and not file.name.endswith(INDEX):
            shutil.copy(file, out / file.name)

    if dtype is not None:
        config = json.loads((out / "config.json").read_text(encoding="utf-8"))
        for section in (config, config.get("text_config")):
            if section is not None:
                section.pop("torch_dtype", None)
                section["dtype"] = str(dtype).removeprefix("torch.")
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
