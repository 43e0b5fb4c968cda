"""Command-line flags of an SGLang server. Imports no heavy library: `mode=plan` shows the flags."""

from collections.abc import Mapping

from app.config import RunConfig
from app.config.placement import PlacementKind
from app.device import Device


def engine_flags(config: RunConfig, device: Device) -> dict[str, object]:
    """Return SGLang's flags by name: ours, then the device's, then `engine_args`. Later ones win."""
    colocate = config.placement.kind is PlacementKind.colocate
    return {
        "dtype": config.device.dtype.name,
        "tp-size": config.rollout.tensor_parallel,
        "random-seed": config.seed,
        "skip-tokenizer-init": True,
        "mem-fraction-static": config.rollout.memory_fraction,
        "trust-remote-code": config.model.trust_remote_code,
        "log-level-http": "warning",
        "enable-memory-saver": colocate and device.shares_memory and config.offload.engine,
        **device.engine_flags,
        **config.device.engine_args,
        **config.rollout.engine_args,
    }


def render_flags(flags: Mapping[str, object]) -> list[str]:
    """Return command-line arguments. True becomes a bare flag; False and None are left out.

    >>> render_flags({"tp-size": 2, "skip-tokenizer-init": True, "trust-remote-code": False})
    ['--tp-size', '2', '--skip-tokenizer-init']
    """
    arguments: list[str] = []
    for flag, value in flags.items():
        if value is None or value is False:
            continue
        arguments.append(f"--{flag}")
        if value is not True:
            arguments.append(str(value))
    return arguments
