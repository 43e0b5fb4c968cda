"""`mode=export`: write a checkpoint of a run as a Hugging Face directory, or a model with a PEFT adapter merged."""

from pathlib import Path

from app.checkpoint.export import FOLDER, export_checkpoint
from app.checkpoint.folder import FOLDER as CHECKPOINTS
from app.checkpoint.folder import find, list_checkpoints
from app.checkpoint.run_state import RunState, lora_of, read_state, require_model
from app.config import RunConfig
from app.config.device import Dtype
from app.errors import ConfigError, echo
from app.mode import ModeResult
from app.model.hf_directory import identity, locate
from app.model.lora.base_weights import require_targets
from app.recovery.run_lock import run_lock
from app.recovery.saved_config import SAVED


def run(config: RunConfig, folder: Path | None) -> ModeResult:
    """Export the run in `folder`, or the checkpoint of `resume=`, or `model.lora.path` merged, and print where to."""
    merges = config.model.lora.path is not None and config.resume == "never"
    echo(str((merge_adapter if merges else export_run)(config, folder)))
    return ModeResult()


def export_run(config: RunConfig, folder: Path | None) -> Path:
    """Export the checkpoint at `resume=<path>`, or the latest one of the run in `folder`, to `export/` in that folder.

    It replaces an earlier export. Raises `ConfigError` without a checkpoint, and `RunError`: `FolderInUse` if another
    process writes the run, `CheckpointError` for a checkpoint that is incomplete or of another model.
    """
    key, path = "hydra.run.dir", folder
    if config.resume not in ("auto", "never"):
        key, path = "resume", Path(config.resume).expanduser()
    checkpoint = None if path is None else find(path)
    if checkpoint is None:
        accepted = "the folder of a run that has checkpoints, or resume=<path> of one of them"
        raise ConfigError(key, path, accepted, "" if path is None else list_checkpoints(path))

    state = read_state(checkpoint)
    source = source_of(config, state)
    require_model(state, identity(source, lora_of(state), state.model.get("chat_template")), checkpoint)

    parent = checkpoint.parent
    run = parent.parent if parent.name == CHECKPOINTS else parent
    run = next((each for each in checkpoint.parents[:3] if (each / SAVED).is_file()), run)  # also of `final/` and aside
    with run_lock(run):
        return export_checkpoint(checkpoint, source, run / FOLDER)


def merge_adapter(config: RunConfig, folder: Path | None) -> Path:
    """Write the model of `model.path` with the adapter of `model.lora.path` merged into it, to `export/` in the folder.

    It has the dtypes of the model unless `device.dtype=float32`. Raises `ConfigError` for a folder with an export, and
    for an adapter of another model.
    """
    accepted = f"a folder without {FOLDER}/ for the merged model"
    if folder is None or (folder / FOLDER).exists():
        raise ConfigError("hydra.run.dir", folder, accepted)
    out = folder / FOLDER
    source, lora = locate(config.model), config.model.lora
    require_targets(source, lora)

    import torch

    from app.model.hf_checkpoint import open_checkpoint
    from app.model.hf_export import export
    from app.model.lora.names import merged

    dtype = torch.float32 if config.device.dtype is Dtype.float32 else None
    with open_checkpoint(Path(str(lora.path)).expanduser()) as adapter:
        tensors = {name: adapter.read(name) for name in adapter.names}
    export(source, merged(source, tensors, lora.scale), out, dtype)
    return out


def source_of(config: RunConfig, state: RunState) -> Path:
    """Return the model directory that the checkpoint names, or `model.path` if that directory no longer exists."""
    source = state.model.get("source")
    if source and Path(str(source)).is_dir():
        return Path(str(source))
    return locate(config.model)
