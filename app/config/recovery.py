"""Settings of `recovery`."""

from dataclasses import dataclass

from app.config.setting import setting


@dataclass
class RecoveryConfig:
    """How many failures a run survives."""

    max_restarts: int = setting(
        3, "Restarts of a failed trainer, without a further step between them, before the run fails.", at_least=0
    )
    max_engine_failures: int = setting(
        5, "Failures in a row of an engine, and failed attempts of one prompt, before the run fails.", at_least=0
    )
