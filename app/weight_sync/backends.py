"""Which collective backend serves which kind of device; the one place that a push asks.

The facts stand in the `Device` values; this only refuses what none of them names.
"""

from app.config.device import DeviceKind
from app.device import device_of
from app.errors import ConfigError

BACKENDS = {device_of(kind).torch_type: device_of(kind).collective for kind in DeviceKind}


def backend_of(torch_type: str) -> str:
    """The `torch.distributed` backend of a device type. Raises `ConfigError` with the known ones.

    >>> backend_of("cpu")
    'gloo'
    """
    if torch_type not in BACKENDS:
        known = ", ".join(f"{device} ({backend})" for device, backend in BACKENDS.items())
        raise ConfigError(f"device={torch_type} is not accepted: a push knows a collective backend for {known}.")
    return BACKENDS[torch_type]
