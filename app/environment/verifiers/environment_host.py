"""What both generations of verifiers have in common here."""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from app.environment.protocol import Policy
from app.environment.rendering import renderer_for
from app.environment.rendering.chat import ChatRenderer
from app.environment.worker.openai_endpoint.endpoint import Endpoint

MODEL = "policy"
API_KEY = "POSTTRAIN_NO_KEY"  # an environment variable that nobody sets: the endpoint takes no key


class EnvironmentFailed(Exception):
    """An episode has no score, and not because of what the policy said."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What an environment is loaded with."""

    package: str  # `environment.id`
    args: Mapping[str, Any]
    tasks: int | None  # the first ones only
    max_turns: int
    renderer: Mapping[str, Any]  # name, model_path, thinking and enable_thinking, as of `renderer_for`

    def renderer_config(self) -> Any:
        """Return the model's configuration in the `renderers` package, as the worker's own renderer has it."""
        from renderers import config_from_name

        name, thinking = self.renderer["name"], self.renderer["thinking"]
        ours = renderer_for(name, self.renderer["model_path"], thinking, self.renderer.get("enable_thinking", False))
        assert isinstance(ours, ChatRenderer)
        return type(config_from_name(name))(
            enable_thinking=ours.thinking_mode, thinking_retention="all" if thinking == "keep" else None
        )


class Host(Protocol):
    """A loaded environment, which plays all episodes of a worker."""

    def rows(self) -> list[dict[str, Any]]:
        """Return the tasks: index, id, question and answer."""
        ...

    async def play(self, index: int, policy: Policy) -> dict[str, float]:
        """Play an episode of a task and return its scores, the reward first."""
        ...


def new_endpoint() -> Endpoint:
    """Return the endpoint of a host. Called on the worker's event loop."""
    return Endpoint(asyncio.get_running_loop(), log)


def log(sentence: str) -> None:
    """Write to the worker's log, which is stderr."""
    sys.stderr.write(f"{sentence}\n")


def question_of(messages: object) -> str:
    """Return the last message of a prompt, for people. Prompts are text or messages."""
    if isinstance(messages, Sequence) and not isinstance(messages, str) and messages:
        last = messages[-1]
        content = last.get("content") if isinstance(last, Mapping) else getattr(last, "content", None)
        return str(content or "")
    return str(messages or "")
