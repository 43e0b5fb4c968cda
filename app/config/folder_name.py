"""Names that a composition makes: of the model with `model=hf`, and of output folders in `conf/config.yaml`."""

import re
import secrets
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from app.config.model import HF_PRESET
from app.config.run import Mode

RUN_ID = secrets.token_hex(3)  # of this process


def register() -> None:
    """Register `${model_name:}`, `${run_name:}` and `${run_id:}`."""
    OmegaConf.register_new_resolver("model_name", model_name, replace=True)
    OmegaConf.register_new_resolver("run_name", run_name, replace=True)
    # Hydra hands cached values to the jobs of a sweep, so a launcher's processes agree on the sweep's folder.
    OmegaConf.register_new_resolver("run_id", lambda: RUN_ID, replace=True, use_cache=True)


def model_name(*, _root_: DictConfig) -> str:
    """Return the last part of `model.path`, fit for a file name: that of `Qwen/Qwen3-4B` is `Qwen3-4B`."""
    path = OmegaConf.select(_root_, "model.path", default=None)
    name = Path(path).expanduser().absolute().name if path else ""
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or HF_PRESET


def run_name(*, _root_: DictConfig) -> str:
    """Return `<model>-<algorithm>-<placement>` of a training run, and `<model>-<mode>` of anything else."""
    mode = OmegaConf.select(_root_, "mode", default=Mode.train)
    if mode is Mode.train:
        choices = _root_.hydra.runtime.choices
        model = _root_.model.name if choices.model == HF_PRESET else choices.model
        return f"{model}-{choices.algorithm}-{choices.placement}"
    return f"{_root_.model.name}-{mode.name}"
