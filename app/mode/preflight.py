"""What a run needs before anything is started: the device, the model's directory, its tokenizer, the prompts.

Done once before the output folder exists, so that a mistake in any of them leaves nothing behind, and again by the run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import app.data.build as data
from app.config import RunConfig
from app.device import device_of
from app.errors import ConfigError
from app.model.hf_directory import load_tokenizer, locate, require_window
from app.utils.net import port_is_free


@dataclass(frozen=True, slots=True)
class RunInputs:
    model_path: Path
    tokenizer: Any
    prompts: data.PromptData


def prepare(config: RunConfig, status: Callable[[str], None]) -> RunInputs:
    """Raises `ConfigError` for a device, model, data set or port that cannot be used."""
    device_of(config.device.kind).require()
    _require_ports(config)
    status("preparing the model")
    path = locate(config.model, seed=config.seed)
    rollout = config.rollout
    require_window(
        path,
        tokens=rollout.max_prompt_tokens + rollout.max_completion_tokens,
        attention=device_of(config.device.kind).attention,
    )
    tokenizer = load_tokenizer(path, trust_remote_code=config.model.trust_remote_code)
    status("preparing the data")
    prompts = data.build(config.data, tokenizer, seed=config.seed, max_prompt_tokens=config.rollout.max_prompt_tokens)
    return RunInputs(path, tokenizer, prompts)


def _require_ports(config: RunConfig) -> None:
    if config.rollout.port is None or config.rollout.urls or config.cluster.address is not None:
        return
    for port in range(config.rollout.port, config.rollout.port + config.engines):
        if not port_is_free("127.0.0.1", port):
            raise ConfigError(
                f"rollout.port={config.rollout.port} is not accepted: port {port} is in use on this machine; "
                f"give the first of {config.engines} free port(s), or null."
            )
