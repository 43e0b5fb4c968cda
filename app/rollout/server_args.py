"""The command line of an engine, as far as SGLang's flags go. Light: the plan shows it without any heavy library."""

from collections.abc import Mapping

from app.config import RunConfig
from app.config.placement import PlacementKind
from app.device import Device


def engine_flags(config: RunConfig, device: Device) -> dict[str, object]:
    """SGLang's flags: ours, then the device's, then the configuration's, which win."""
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
        **device.engine_args,
        **config.device.engine_args,
        **config.rollout.engine_args,
    }


def render_flags(flags: Mapping[str, object]) -> list[str]:
    """Return the command-line arguments for SGLang's flags, named without dashes.

    >>> render_flags({"tp-size": 4, "skip-tokenizer-init": True, "device": None, "enable-memory-saver": False})
    ['--tp-size', '4', '--skip-tokenizer-init']
    """
    arguments: list[str] = []
    for flag, value in flags.items():
        if value is True:
            arguments.append(f"--{flag}")
        elif value is not None and value is not False:
            arguments += [f"--{flag}", str(value)]
    return arguments
