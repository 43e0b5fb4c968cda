"""The turns of an episode as text, for samples and the report."""

from collections.abc import Sequence
from typing import Any

from app.environment.protocol import Message, Reply
from app.environment.worker.clock import Clock
from app.environment.worker.conversation import spoken


class Transcript:
    """The turns of one episode.

    Args:
        clock: Measures the environment's own time.

    Attributes:
        turns: role, text, tokens and seconds, in order.
    """

    def __init__(self, clock: Clock) -> None:
        self.turns: list[dict[str, Any]] = []
        self._clock = clock
        self._noted_s = 0.0  # the environment's own seconds that are in `turns`

    def add_messages(self, messages: Sequence[Message], tokens: int) -> None:
        """Add what the policy reads. The tokens and seconds are of all of it: the last message has them."""
        if not messages:
            return
        seconds = self._clock.seconds - self._noted_s
        self._noted_s += seconds

        for message in messages[:-1]:
            self._add(str(message.get("role")), str(message.get("content") or ""), 0, 0.0)
        last = messages[-1]
        self._add(str(last.get("role")), str(last.get("content") or ""), tokens, seconds)

    def add_reply(self, reply: Reply, seconds: float) -> None:
        """Add what the policy replied. `seconds`: of the engine."""
        self._add("assistant", spoken(reply), len(reply.token_ids), seconds)

    def _add(self, role: str, text: str, tokens: int, seconds: float) -> None:
        self.turns.append({"role": role, "text": text, "tokens": tokens, "seconds": seconds})
