"""The inputs of a run: a usable device, model directory, tokenizer, data, environment, reward, ports.

`preflight` checks them before the output folder exists, so that an invalid run leaves nothing behind. The tokenizer and
the prompts are loaded once: the run gets them from `take_inputs`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import app.data.build as data
from app.algorithm.custom_functions import require_own
from app.checkpoint.run_state import read_state, require_model
from app.config import Mode, RunConfig
from app.data.counts import steps_of_epochs
from app.data.rows import Tasks
from app.device import Device, device_of
from app.errors import ConfigError
from app.mode.environments import require_environment, require_rendering
from app.mode.inputs import check_sizes, tried_reward
from app.model.architecture import checkpoint_config, require_context
from app.model.hf_directory import (
    has_linear_attention,
    identity,
    load_tokenizer,
    locate,
    own_template,
    require_window,
)
from app.model.lora.base_weights import require_targets
from app.placement.controller import CURSOR
from app.reward.tryout import tokenizer_of, try_out
from app.tracking.own_tracker import require_trackers
from app.types import Prompt
from app.utils.net import port_is_free
from app.weight_sync.own_transport import own_transport


@dataclass(frozen=True, slots=True)
class RunInputs:
    """The model directory, the tokenizer and the tokenized prompts of a run."""

    model_path: Path
    chat_template: str | None  # text of `model.chat_template`
    tokenizer: Any
    prompts: data.PromptData
    warnings: tuple[str, ...] = ()  # for the run to record


# Hydra offers no way to hand a value from its callback to the job of the same process.
_loaded: list[tuple[RunConfig, RunInputs]] = []


def preflight(config: RunConfig, checkpoint: Path | None = None) -> None:
    """Check and load the inputs of a run, and count the steps of its epochs.

    Args:
        config: The configuration of the run; its `steps` follow from `epochs`, if that is set.
        checkpoint: The checkpoint that the run starts from, if any.

    Raises:
        ConfigError: For the first unusable input, or if the training data is not that of the checkpoint.
        CheckpointError: The checkpoint is of another model.
    """
    inputs = _load(config, status=lambda _: None)
    if checkpoint is not None:
        _require_same_run(config, inputs, checkpoint)
    if config.mode is Mode.train and config.epochs is not None:
        prompts = len(inputs.prompts.train)
        config.steps = steps_of_epochs(config.epochs, prompts, config.algorithm.prompts_per_step)
    _loaded[:] = [(config, inputs)]


def take_inputs(config: RunConfig, status: Callable[[str], None]) -> RunInputs:
    """Return the inputs that `preflight` loaded for this configuration, or load them (in a sweep's jobs)."""
    while _loaded:
        checked, inputs = _loaded.pop()
        if checked == config:
            return inputs
    return _load(config, status)


def _load(config: RunConfig, status: Callable[[str], None]) -> RunInputs:
    check_sizes(config)
    device_of(config.device.kind).require()
    _require_ports(config)

    status("preparing the model")
    return load_from(locate(config.model), config, status)


def load_from(path: Path, config: RunConfig, status: Callable[[str], None]) -> RunInputs:
    """Load the inputs of a run whose model is in this directory. Raises `ConfigError` for unusable ones."""
    rollout = config.rollout
    fields = checkpoint_config(replace(config.model, path=str(path), revision=None))
    require_context(rollout, fields, str(config.model.path))  # of a hub model, known only after its download
    window = rollout.max_prompt_tokens + rollout.max_completion_tokens
    require_window(path, tokens=window)
    if config.model.lora.enabled:
        require_targets(path, config.model.lora)
    template = own_template(config.model)
    tokenizer = load_tokenizer(path, trust_remote_code=config.model.trust_remote_code, chat_template=template)
    require_rendering(config, path, tokenizer)

    tasks: Tasks = ()
    if config.environment.multi_turn:
        status("trying the environment")
        tasks = require_environment(config, path)

    status("preparing the data")
    longest = rollout.max_prompt_tokens
    prompts = data.build(config.data, tokenizer, seed=config.seed, max_prompt_tokens=longest, tasks=tasks)
    warnings = [*prompts.warnings, *_slow_attention(path, device_of(config.device.kind))]
    if config.mode is Mode.train:
        warnings += prompts.counts.repeated(config.algorithm.prompts_per_step)
    if prompts.dropped:
        warnings.append(
            f"dropped {prompts.dropped} of {prompts.total} prompts: longer than "
            f"rollout.max_prompt_tokens={rollout.max_prompt_tokens}"
        )

    require_own(config.algorithm)
    status("trying the reward")
    require_trackers(config.tracking)
    own_transport(config.weight_sync)
    warnings += try_out(tried_reward(config), _some_prompts(config, prompts), tokenizer_of(tokenizer))
    return RunInputs(path, template, tokenizer, prompts, tuple(warnings))


def _some_prompts(config: RunConfig, prompts: data.PromptData) -> list[Prompt]:
    """Return a training prompt and the first of each evaluation set, whose rows may have other columns."""
    evaluated = [each[0] for each in prompts.evals.values()]
    if config.mode is Mode.eval:
        return evaluated

    start = prompts.train.state()
    (trained,) = prompts.train.take(1)
    prompts.train.restore(start)
    return [trained, *evaluated]


def _slow_attention(path: Path, device: Device) -> list[str]:
    """Warn if an accelerator would train linear attention without kernels."""
    if not device.shares_memory or not has_linear_attention(path) or not device.loops_linear_attention():
        return []

    remedy = f"device={device.kind.name} has no kernels for it"
    if device.linear_attention is not None:
        remedy = f"install {device.linear_attention}"
    return [
        f"the linear attention of {path.name} trains in transformers' torch loop over chunks of 64 tokens, more than "
        f"ten times slower than kernels: {remedy}"
    ]


def _require_same_run(config: RunConfig, inputs: RunInputs, checkpoint: Path) -> None:
    state = read_state(checkpoint)
    require_model(state, identity(inputs.model_path, config.model.lora, inputs.chat_template), checkpoint)

    if config.mode is Mode.train:
        cursor = inputs.prompts.train
        start = cursor.state()
        cursor.restore(state.extra[CURSOR])  # compares the data
        cursor.restore(start)


def _require_ports(config: RunConfig) -> None:
    if config.rollout.port is None or config.rollout.urls or config.cluster.address is not None:
        return

    for port in range(config.rollout.port, config.rollout.port + config.engines):
        if not port_is_free("127.0.0.1", port):
            accepted = f"the first of {config.engines} free port(s), or null"
            why = f"port {port} is in use on this machine"
            raise ConfigError("rollout.port", config.rollout.port, accepted, why)
