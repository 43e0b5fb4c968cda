"""What the design names and is not built yet: refused at start, so that nobody runs something else unknowingly."""

from app.config import RunConfig
from app.device.schema import DeviceKind
from app.errors import ConfigError
from app.placement.schema import PlacementKind


def refuse(config: RunConfig) -> None:
    """Raise `ConfigError` with one sentence where the configuration asks for what is not built yet."""
    shared = config.placement.kind is PlacementKind.colocate and config.device.kind is not DeviceKind.cpu
    if shared and (config.offload.engine or config.offload.trainer):
        raise ConfigError(
            f"offload.engine and offload.trainer are not built yet for device={config.device.kind.name}: "
            "set both to false, or use placement=fully_async."
        )
