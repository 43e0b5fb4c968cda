"""What the design names and is not built yet: refused at start, so that nobody runs something else unknowingly."""

from app.config import Mode, RunConfig
from app.errors import ConfigError


def refuse(config: RunConfig) -> None:
    """Raise `ConfigError` with one sentence where the configuration asks for what is not built yet."""
    if config.mode not in (Mode.train, Mode.plan):
        raise ConfigError(f"mode={config.mode.name} is not built yet: use mode=train or mode=plan.")
