"""A PEFT adapter to start from (`model.lora.path`): its rank, alpha and layers become those of `model.lora`."""

import json
from math import sqrt
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from app.config.command_line import names_of
from app.errors import ConfigError, expect

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LENGTH_BYTES = 8  # of the header's length, at the beginning of a safetensors file
# Settings of PEFT that change what an adapter computes, or train more than adapters.
UNSUPPORTED = (
    "alora_invocation_tokens alpha_pattern fan_in_fan_out layer_replication lora_bias modules_to_save rank_pattern "
    "target_parameters trainable_token_indices use_bdlora use_dora use_qalora"
)


def take_settings(composed: DictConfig) -> None:
    """Set rank, alpha and targets of `model.lora` to those of the adapter at `model.lora.path`, if there is one."""
    lora = composed.model.lora
    if lora.path is None:
        return
    path = Path(str(lora.path)).expanduser()
    try:
        found: dict[str, Any] = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        with (path / WEIGHTS).open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(LENGTH_BYTES), "little")))
        rank, alpha = int(found["r"]), float(found["lora_alpha"])
    except (OSError, ValueError, KeyError) as error:
        accepted = f"the directory of a LoRA adapter of PEFT, with {CONFIG} and {WEIGHTS}"
        raise ConfigError("model.lora.path", lora.path, accepted, f"{type(error).__name__}: {error}") from error

    other = [name for name in UNSUPPORTED.split() if found.get(name)]
    other += [f"{key}={found[key]}" for key, plain in (("peft_type", "LORA"), ("bias", "none")) if found[key] != plain]
    expect(not other, "model.lora.path", lora.path, f"a plain LoRA adapter; this one has {', '.join(other)}")

    # rsLoRA divides by √rank (arXiv 2312.03732)
    taken: dict[str, Any] = {"rank": rank, "alpha": alpha * sqrt(rank) if found.get("use_rslora") else alpha}
    taken["targets"] = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in header if ".lora_" in name})
    given = names_of(composed.hydra.overrides.task)
    ours: Any = OmegaConf.to_container(lora)
    for name, value in taken.items():
        same = f"model.lora.{name}" not in given or ours[name] == value
        expect(same, f"model.lora.{name}", ours[name], f"{value}, as model.lora.path has")
        lora[name] = value
