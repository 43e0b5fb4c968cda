"""Default names of output folders: the resolvers in `hydra.run.dir` and `hydra.sweep.dir` of `conf/config.yaml`."""

import secrets

from omegaconf import DictConfig, OmegaConf

from app.config.run import Mode

RUN_ID = secrets.token_hex(3)  # of this process


def register() -> None:
    """Register `${run_name:}` and `${run_id:}`."""
    OmegaConf.register_new_resolver("run_name", run_name, replace=True)
    # Hydra hands cached values to the jobs of a sweep, so a launcher's processes agree on the sweep's folder.
    OmegaConf.register_new_resolver("run_id", lambda: RUN_ID, replace=True, use_cache=True)


def run_name(*, _root_: DictConfig) -> str:
    """Return `<model>-<algorithm>-<placement>` of a training run, and `<model>-<mode>` of anything else."""
    mode = OmegaConf.select(_root_, "mode", default=Mode.train)
    if mode is Mode.train:
        choices = _root_.hydra.runtime.choices
        return f"{choices.model}-{choices.algorithm}-{choices.placement}"
    return f"{_root_.model.name}-{mode.name}"
