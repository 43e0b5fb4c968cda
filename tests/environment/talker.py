"""The worker's own policy with a real renderer and scripted replies: no process, no engine."""

from collections.abc import Sequence

from app.environment.protocol import Message, Renderer
from app.environment.wire import Answer, Limits
from app.environment.worker.calls import Clock
from app.environment.worker.policy import EpisodePolicy
from tests.environment.qwen import decoded, ids


class Talker:
    """Says one text after the other; then `OutOfTurns` is raised."""

    def __init__(
        self, renderer: Renderer, *script: str, opening: Sequence[Message] = (), prompt: Sequence[int] = ()
    ) -> None:
        self.sequences: dict[int, list[int]] = {}
        self.requests: list[tuple[int, str]] = []
        self._script = iter(script)
        limits = Limits(len(script), None, max_observation_tokens=999, timeout_s=60.0, episode_s=60.0)
        self.policy = EpisodePolicy(self._ask, renderer, limits, opening, prompt, Clock(60.0), lambda policy: "")

    async def _ask(self, sequence: int, context: Sequence[int], max_tokens: int | None, logprobs: bool) -> Answer:
        before = self.sequences.get(sequence, [])
        assert list(context[: len(before)]) == before
        tokens = self.sequences[sequence] = list(context)
        self.requests.append((sequence, decoded(tokens)))
        said = ids(next(self._script))
        tokens += said
        return Answer(0, said, "stop")

    @property
    def observations(self) -> list[str]:
        """What tools answered."""
        return [turn["text"] for turn in self.policy.turns if turn["role"] == "tool"]
