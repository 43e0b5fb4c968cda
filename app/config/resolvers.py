"""OmegaConf resolvers of `conf/`: the settings in `--help`, names of models and output folders, learning rates."""

import inspect
import re
import secrets
import textwrap
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from app.config.command_line import command_name
from app.config.model import HF_PRESET, LORA_RATE
from app.config.run import Mode, RunConfig
from app.config.setting import settings
from app.errors import yaml_text

WIDTH = 100  # columns
VALUE_WIDTH = 44  # columns of "key = value"
INDENT = " " * 6
FOLDER_BYTES = 150  # of a sweep's job; file systems allow 255
RUN_ID = secrets.token_hex(3)  # of this process


def settings_help(section: str | None = None, *, _root_: DictConfig) -> str:
    """Render all settings, those of a section or one: its value in a composition, accepted values and meaning.

    The OmegaConf resolver behind `${settings_help:}` in `conf/config.yaml`. Hydra fills the result in a
    `string.Template`, hence the doubled dollar signs.
    """
    lines: list[str] = []
    previous: type | None = None

    for each in settings(RunConfig):
        if section and each.key != section and not each.key.startswith(f"{section}."):
            continue
        if each.section is not previous:
            prefix = each.key.rpartition(".")[0] or "run"
            lines += ["", f"{prefix}: {(inspect.getdoc(each.section) or '').splitlines()[0]}"]
            previous = each.section

        value = OmegaConf.select(_root_, each.key, default=each.default)
        if OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=True)
        shown = yaml_text(value) or "''"
        lines.append(f"  {f'{each.key} = {shown}':<{VALUE_WIDTH}}  {each.accepted}")
        lines += textwrap.wrap(each.help, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)

    return "\n".join(lines).strip("\n").replace("$", "$$")


def register() -> None:
    """Register the resolvers."""
    for resolver in (settings_help, command_name, folder_name, learning_rate, model_name, run_name):
        OmegaConf.register_new_resolver(resolver.__name__, resolver, replace=True)
    # Hydra hands cached values to the jobs of a sweep, so a launcher's processes agree on the sweep's folder.
    OmegaConf.register_new_resolver("run_id", lambda: RUN_ID, replace=True, use_cache=True)


def folder_name(text: str) -> str:
    """Return the overrides of a sweep's job as the name of one folder.

    >>> folder_name("data.path-rows/a.jsonl+seed-0")
    'data.path-rows-a.jsonl+seed-0'
    """
    return re.sub(r"[^\w.+-]+", "-", text).encode()[:FOLDER_BYTES].decode(errors="ignore")


def model_name(*, _root_: DictConfig) -> str:
    """Return the last part of `model.path`, fit for a file name: that of `Qwen/Qwen3-4B` is `Qwen3-4B`."""
    path = OmegaConf.select(_root_, "model.path", default=None)
    name = Path(path).expanduser().absolute().name if path else ""
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or HF_PRESET


def learning_rate(full: float, *, _root_: DictConfig) -> float:
    """Return a preset's `trainer.lr`: that of full fine-tuning, or of adapters, which need more whatever their rank."""
    adapters = OmegaConf.select(_root_, "model.lora.rank", default=0)
    return float(f"{LORA_RATE * full:.6g}") if adapters else full


def run_name(*, _root_: DictConfig) -> str:
    """Return `<model>-<algorithm>-<placement>` of a training run, and `<model>-<mode>` of anything else."""
    mode = OmegaConf.select(_root_, "mode", default=Mode.train)
    if mode is Mode.train:
        choices = _root_.hydra.runtime.choices
        model = _root_.model.name if choices.model == HF_PRESET else choices.model
        return f"{model}-{choices.algorithm}-{choices.placement}"
    return f"{_root_.model.name}-{mode.name}"
