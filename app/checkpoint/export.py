"""From a checkpoint to a Hugging Face directory: `mode=export`, and the end of a run with `checkpoint.export=true`.

Neither Ray nor an engine nor an accelerator is needed: one process reads the checkpoint tensor by tensor, whatever
number of ranks wrote it. `export/` is replaced only by a complete one.
"""

import asyncio
import shutil
from pathlib import Path

from app.checkpoint.manager import FOLDER as CHECKPOINTS
from app.checkpoint.manager import Checkpoints, RunState, find, latest, read_state, require_model
from app.config import RunConfig
from app.errors import ConfigError, RunError
from app.model.hf_directory import identity, locate
from app.protocols import Trainer
from app.utils import files as durable

FOLDER, FINAL = "export", "final"


def export_run(config: RunConfig, folder: Path) -> Path:
    """Export the checkpoint of `resume=<path>`, or else the latest of the run in `folder`; returns the directory.

    It stands beside that checkpoint's `checkpoints/`, and replaces an earlier export. Raises `ConfigError` where there
    is no checkpoint, `CheckpointError` for one that is not whole or of another model, `RunError` where it cannot be
    written.
    """
    path = _checkpoint(config, folder)
    state = read_state(path)
    source = _source(config, state)
    require_model(state, identity(source), path)
    run = path.parent.parent if path.parent.name == CHECKPOINTS else path.parent
    return write(path, source, run / FOLDER)


async def export_trained(trainer: Trainer, config: RunConfig, folder: Path) -> Path:
    """Export what the trainer holds at the end of the run in `folder`, from its last checkpoint if that is as new.

    Where it is not, one is written for this into `final/`, which stays only if the export fails: `mode=export
    resume=<folder>/final` tries again.
    """
    source, last = locate(config.model, seed=config.seed), latest(folder)
    if last is not None and read_state(last).step == config.steps:
        return await asyncio.to_thread(write, last, source, folder / FOLDER)
    final = Checkpoints(folder / FINAL, keep=1, timeout_s=config.trainer.timeout_s)
    path = await final.save(trainer, RunState(config.steps, config.steps, model=identity(source)))
    await final.wait()
    out = await asyncio.to_thread(write, path, source, folder / FOLDER)
    shutil.rmtree(folder / FINAL)
    return out


def write(weights: Path, source: Path, out: Path) -> Path:
    """The directory `source` with the trained tensors of the checkpoint `weights` in it, as `out`."""
    from safetensors import SafetensorError

    from app.model.hf_export import export
    from app.trainer import checkpoint_state as state

    following = out.with_name(f"{out.name}.new{durable.UNFINISHED}")
    try:
        durable.remove(following)
        export(source, state.weights(weights), following)
        if out.exists():
            durable.delete(out)
        following.rename(out)
        durable.sync(out.parent)
    except (OSError, SafetensorError) as error:
        raise RunError(f"export to {out}: {error}") from error
    return out


def _checkpoint(config: RunConfig, folder: Path) -> Path:
    given = config.resume not in ("auto", "never")
    path = find(Path(config.resume).expanduser() if given else folder)
    if path is None:
        key, value = ("resume", config.resume) if given else ("hydra.run.dir", str(folder))
        raise ConfigError(
            f"{key}={value} is not accepted: give the folder of a run that has checkpoints (checkpoint.every=… saves "
            "them; there are none by default), or resume=<path> of a checkpoint."
        )
    return path


def _source(config: RunConfig, state: RunState) -> Path:
    """Where the model was when the checkpoint was made; `model.path` where it is not there any more."""
    source = Path(str(state.model.get("source", "")))
    return source if state.model.get("source") and source.is_dir() else locate(config.model, seed=config.seed)
