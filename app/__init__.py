"""RL post-training of language models on CUDA GPUs, Ascend NPUs or a plain CPU, composed by Hydra from one command.

The names below are for rewards and environments of the user's. They are imported on first use, so that importing a
module of this package imports nothing else.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from app.environment.protocol import EpisodeOver, OutOfTime, OutOfTokens, OutOfTurns, Policy, Reply, Task, ToolCall
    from app.errors import ConfigError, Interrupted, RunError
    from app.types import Completion, FinishReason, Prompt, Trajectory, Turn, VersionSpan

__all__ = [
    "Completion",
    "ConfigError",
    "EpisodeOver",
    "FinishReason",
    "Interrupted",
    "OutOfTime",
    "OutOfTokens",
    "OutOfTurns",
    "Policy",
    "Prompt",
    "Reply",
    "RunError",
    "Task",
    "ToolCall",
    "Trajectory",
    "Turn",
    "VersionSpan",
]

_MODULES = {  # of the others: app.environment.protocol
    "app.errors": ("ConfigError", "Interrupted", "RunError"),
    "app.types": ("Completion", "FinishReason", "Prompt", "Trajectory", "Turn", "VersionSpan"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = next((module for module, names in _MODULES.items() if name in names), "app.environment.protocol")
    return getattr(importlib.import_module(module), name)
