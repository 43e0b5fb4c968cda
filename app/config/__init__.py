"""Settings: one file per section of the configuration, `config/<section>.py`."""

from app.config.run import Mode, RunConfig

__all__ = ["Mode", "RunConfig"]
