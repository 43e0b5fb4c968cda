"""Export of a checkpoint as a Hugging Face directory, for `mode=export` and `checkpoint.export=true`.

One process reads the checkpoint tensor by tensor, whatever number of ranks wrote it. It needs neither Ray nor an engine
nor an accelerator.

Invariants:
- `export/` is replaced only by a complete directory.
- Adapters are merged into the base in float32, rounded once to its dtype, and also written to `export/adapter/` as they
  are.
"""

import asyncio
import contextlib
import shutil
from pathlib import Path

from app.checkpoint.folder import latest
from app.checkpoint.manager import CheckpointManager
from app.checkpoint.model_card import NAME as CARD
from app.checkpoint.model_card import model_card
from app.checkpoint.run_state import RunState, lora_of, read_intact, read_state
from app.config import RunConfig
from app.config.command_line import command, override
from app.config.model import LoraConfig
from app.errors import RunError
from app.model.hf_directory import identity, locate
from app.protocols import Trainer
from app.utils import files
from app.utils.tasks import in_thread

FOLDER, FINAL, ADAPTER = "export", "final", "adapter"
CHAT_TEMPLATE = "chat_template.jinja"  # before one in tokenizer_config.json


async def export_trained(
    trainer: Trainer, config: RunConfig, folder: Path, *, step: int, chat_template: str | None
) -> Path:
    """Export the trainer's parameters at the end of the run in `folder`.

    Exports the last checkpoint if it is of the last step. Otherwise writes one to `final/`, which is deleted after the
    export. If the export fails, `final/` stays, and `mode=export resume=<folder>/final` retries.

    Args:
        trainer: Holds the parameters.
        config: Of the run.
        folder: Of the run.
        step: The last one.
        chat_template: Text of `model.chat_template`, as the run began with it.

    Returns:
        The exported directory.

    Raises:
        CheckpointError: The checkpoint is damaged, or `final/` cannot be written.
        RunError: The export failed, or was not finished within `trainer.timeout_s`.
    """
    source = locate(config.model)
    last = latest(folder)
    if last is not None and read_state(last).step == step:
        return await _export(last, source, folder / FOLDER, config.trainer.timeout_s)

    final = CheckpointManager(folder / FINAL, keep=1, timeout_s=config.trainer.timeout_s)
    state = RunState(step, step, model=identity(source, config.model.lora, chat_template))
    checkpoint = await final.save(trainer, state)
    await final.wait()
    out = await _export(checkpoint, source, folder / FOLDER, config.trainer.timeout_s)
    shutil.rmtree(folder / FINAL)
    return out


async def _export(checkpoint: Path, source: Path, out: Path, timeout_s: float) -> Path:
    try:
        return await asyncio.wait_for(in_thread(export_checkpoint, checkpoint, source, out), timeout_s)
    except TimeoutError:
        raise RunError(
            f"the export of {checkpoint} to {out} was not finished within trainer.timeout_s={timeout_s:g} s; "
            f"{command('mode=export', override('resume', checkpoint))} exports it without a deadline"
        ) from None


def export_checkpoint(checkpoint: Path, source: Path, out: Path) -> Path:
    """Copy the model directory `source` to `out`, with the tensors of a checkpoint in place of its own.

    Of a checkpoint with adapters, those are merged into the tensors of `source`.
    The cards describe the run in `out.parent`.

    Raises:
        CheckpointError: The checkpoint is damaged.
        RunError: `out` cannot be written.
    """
    from safetensors import SafetensorError

    state = read_intact(checkpoint)
    template = state.model.get("chat_template")
    unfinished = out.with_name(f"{out.name}.new{files.UNFINISHED}")
    try:
        files.remove(unfinished)
        _write(checkpoint, source, lora_of(state), unfinished)
        _write_cards(unfinished, out.parent, source, state.step)
        if template is not None:
            (unfinished / CHAT_TEMPLATE).write_text(template, encoding="utf-8")
        if out.exists():
            files.delete(out)
        unfinished.rename(out)
        files.sync(out.parent)
    except (OSError, SafetensorError) as error:
        raise RunError(f"export to {out} failed: {error}") from error
    finally:
        _discard(unfinished)
    return out


def _write(checkpoint: Path, source: Path, lora: LoraConfig, out: Path) -> None:
    from app.model.hf_export import export, export_adapter
    from app.model.lora.merge import merged
    from app.model.lora.names import adapter_config
    from app.trainer.checkpoint_state import read_weights

    if not lora.enabled:
        export(source, read_weights(checkpoint), out)
        return

    adapters = dict(read_weights(checkpoint))
    export(source, merged(source, adapters, lora.scale), out)
    export_adapter(adapters, adapter_config(lora, adapters, str(source)), out / ADAPTER)


def _write_cards(out: Path, run: Path, source: Path, step: int) -> None:
    (out / CARD).write_text(model_card(run, source, step))
    if (out / ADAPTER).is_dir():
        (out / ADAPTER / CARD).write_text(model_card(run, source, step, adapter=True))


def _discard(unfinished: Path) -> None:
    """Remove what a failed export left. An error here must not hide the one that came first."""
    with contextlib.suppress(OSError):
        files.remove(unfinished)
