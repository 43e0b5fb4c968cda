"""The messages that a question of the data set becomes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.environment.protocol import Message, Task


@dataclass(frozen=True, slots=True)
class Framing:
    """What the data puts around a question."""

    system: str | None
    prefix: str
    suffix: str

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "Framing":
        """Return the framing that a worker's settings name as `system`, `prefix` and `suffix`."""
        return cls(settings.get("system"), settings.get("prefix", ""), settings.get("suffix", ""))

    def messages(self, task: Task) -> list[Message]:
        """Return the conversation that an episode opens with. The driver has framed one that is of the data."""
        if task.messages:
            return list(task.messages)
        user = {"role": "user", "content": self.prefix + task.question + self.suffix}
        return [user] if self.system is None else [{"role": "system", "content": self.system}, user]
