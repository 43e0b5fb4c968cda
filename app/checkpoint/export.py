"""Export of a checkpoint as a Hugging Face directory, for `mode=export` and `checkpoint.export=true`.

One process reads the checkpoint tensor by tensor, whatever number of ranks wrote it, and app/model/hf_export.py writes
them. It needs neither Ray nor an engine nor an accelerator.

Invariants:
- `export/` is replaced only by a complete directory.
- Trained tensors have the dtypes of the source, but float32 if the run computed in it: short trainings move weights by
  less than a step of bfloat16's grid.
- Adapters are merged into the base in float32, rounded at most once, and also written to `export/adapter/` as they are.
- The model card replaces that of the base and keeps its license. It has no local paths: exports are published.
"""

import asyncio
import contextlib
import re
import shutil
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from app.checkpoint.folder import latest
from app.checkpoint.manager import CheckpointManager
from app.checkpoint.run_state import RunState, lora_of, read_intact, read_state
from app.config import Mode, RunConfig
from app.config.command_line import DISTRIBUTION, command, override
from app.config.device import Dtype
from app.config.model import LoraConfig, ModelConfig
from app.data.records import is_remote
from app.errors import RunError
from app.model.hf_directory import identity, is_path, locate
from app.protocols import Trainer
from app.tracking.run_folder import read_config
from app.utils import files
from app.utils.tasks import in_thread

FOLDER, FINAL, ADAPTER = "export", "final", "adapter"
CHAT_TEMPLATE = "chat_template.jinja"  # before one in tokenizer_config.json
CARD = "README.md"
LICENSE = re.compile(r"^(license|license_name|license_link): *\"?([\w./:-]+)\"?$", re.MULTILINE)
LOAD = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

path = "{name}"  # this directory, or its id on a hub
model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
tokenizer = AutoTokenizer.from_pretrained(path)"""
LOAD_ADAPTER = """\
from peft import PeftModel
from transformers import AutoModelForCausalLM

path = "{name}"  # this directory, or its id on a hub
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}", dtype="auto"), path)"""


async def export_trained(
    trainer: Trainer, config: RunConfig, folder: Path, *, step: int, chat_template: str | None
) -> None:
    """Export the trainer's parameters at the end of the run in `folder` to `export/` there.

    Exports the last checkpoint if it is of the last step. Otherwise writes one to `final/`, which is deleted after the
    export. If the export fails, `final/` stays, and `mode=export resume=<folder>/final` retries.

    Raises:
        CheckpointError: The checkpoint is damaged, or `final/` cannot be written.
        RunError: The export failed, or was not finished within `trainer.timeout_s`.
    """
    source, out = locate(config.model), folder / FOLDER
    timeout_s = config.trainer.timeout_s
    checkpoint = latest(folder)
    if checkpoint is None or read_state(checkpoint).step != step:
        final = CheckpointManager(folder / FINAL, keep=1, timeout_s=timeout_s)
        state = RunState(step, step, model=identity(source, config.model.lora, chat_template))
        checkpoint = await final.save(trainer, state)
        await final.wait()

    try:
        await asyncio.wait_for(in_thread(export_checkpoint, checkpoint, source, out), timeout_s)
    except TimeoutError:
        late = f"the export of {checkpoint} to {out} was not finished within trainer.timeout_s={timeout_s:g} s"
        again = command("mode=export", override("resume", checkpoint))
        raise RunError(f"{late}; {again} exports it without a deadline") from None
    if checkpoint.is_relative_to(folder / FINAL):
        shutil.rmtree(folder / FINAL)


def export_checkpoint(checkpoint: Path, source: Path, out: Path) -> Path:
    """Copy the model directory `source` to `out`, with the tensors of a checkpoint in place of its own.

    Adapters are merged into the tensors of `source`. The dtype and the cards are those of the run in `out.parent`.
    """
    from safetensors import SafetensorError

    state = read_intact(checkpoint)
    template = state.model.get("chat_template")
    unfinished = out.with_name(f"{out.name}.new{files.UNFINISHED}")
    try:
        files.remove(unfinished)
        _write(checkpoint, source, out.parent, lora_of(state), unfinished)
        (unfinished / CARD).write_text(model_card(out.parent, source, state.step), encoding="utf-8")
        if (unfinished / ADAPTER).is_dir():
            card = model_card(out.parent, source, state.step, adapter=True)
            (unfinished / ADAPTER / CARD).write_text(card, encoding="utf-8")
        if template is not None:
            (unfinished / CHAT_TEMPLATE).write_text(template, encoding="utf-8")
        if out.exists():
            files.delete(out)
        unfinished.rename(out)
        files.sync(out.parent)
    except (OSError, SafetensorError) as error:
        raise RunError(f"export to {out} failed: {error}") from error
    finally:
        # An error here must not hide the one that came first.
        with contextlib.suppress(OSError):
            files.remove(unfinished)
    return out


def _write(checkpoint: Path, source: Path, run: Path, lora: LoraConfig, out: Path) -> None:
    import torch

    from app.model.hf_export import export, export_adapter
    from app.model.lora.names import adapter_config, merged
    from app.trainer.checkpoint_state import read_weights

    config, _ = read_config(run)
    dtype = torch.float32 if config.get("device.dtype") == Dtype.float32.name else None
    if not lora.enabled:
        export(source, read_weights(checkpoint), out, dtype)
        return

    adapters = dict(read_weights(checkpoint))
    export(source, merged(source, adapters, lora.scale), out, dtype)
    export_adapter(adapters, adapter_config(lora, adapters, _hub_base(config) or str(source)), out / ADAPTER)


def _hub_base(config: Mapping[str, Any]) -> str | None:
    base = config.get("model.path")
    return base if base and not is_path(base) and not ModelConfig(path=base).local.exists() else None


def model_card(run: Path, source: Path, step: int, *, adapter: bool = False) -> str:
    """Return the card of the model, or of its adapter alone, after `step`, as far as the run's folder tells."""
    from huggingface_hub import ModelCardData

    config, _ = read_config(run)
    base, data = config.get("model.path"), config.get("data.path")
    hub_base = _hub_base(config)
    hub_data = data if isinstance(data, str) and is_remote(data) and not Path(data).exists() else None
    base_name = hub_base or (Path(base).name if base else config.get("model.name", source.name))
    imitated = config.get("mode") == Mode.sft.name
    algorithm = Mode.sft.name if imitated else config.get("algorithm.name", "RL")

    base_card = (source / CARD).read_text(encoding="utf-8") if (source / CARD).is_file() else ""
    front = ModelCardData(
        base_model=hub_base,
        datasets=[hub_data] if hub_data else None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=[algorithm, *([] if imitated else ["reinforcement-learning"]), *(["lora"] if adapter else [])],
        **dict(LICENSE.findall(base_card.partition("\n---")[0])),
    )
    name = f"{base_name.rpartition('/')[2]}-{algorithm}"
    load = (LOAD_ADAPTER if adapter else LOAD).format(base=base_name, name=name)
    trained = f"{base_name} after {step} steps of {algorithm}, by {DISTRIBUTION} {version(DISTRIBUTION)}."
    return f"---\n{front.to_yaml()}\n---\n\n# {name}\n\n{trained}\n\n```python\n{load}\n```\n"
