"""A renderer whose tokens are characters, for workers that have no tokenizer. An environment's module installs it.

    opening: the contents, joined by `|`, then `>`     following: `|`, the contents, `>`     reply: the characters

`forget` in a new message: the template rewrites the history. A reply `!name` calls a tool.
"""

import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

from app.environment.protocol import Reply, ToolCall


def tokens(text: str) -> list[int]:
    return [ord(character) for character in text]


def text_of(token_ids: Sequence[int]) -> str:
    return "".join(map(chr, token_ids))


class Characters:
    def opening(self, messages: Sequence[Mapping[str, Any]], tools: object = None) -> list[int]:
        return tokens("|".join(str(message["content"]) for message in messages) + ">")

    def following(
        self, token_ids: Sequence[int], messages: Sequence[Mapping[str, Any]], tools: object = None
    ) -> list[int] | None:
        text = "|".join(str(message["content"]) for message in messages)
        return None if "forget" in text else tokens(f"|{text}>")

    def decode(self, token_ids: Sequence[int]) -> str:
        return text_of(token_ids)

    def parse(self, token_ids: Sequence[int], prompt_ids: Sequence[int] = (), tools: object = None) -> Reply:
        text = text_of(token_ids)
        if text.startswith("!"):
            return Reply("", tool_calls=(ToolCall(text[1:], {}, "ok"),))
        return Reply(text)


def renderer_for(
    name: str, model_path: str, thinking: str, enable_thinking: bool, template: str | None, variables: str
) -> Characters:
    if name != "characters":
        raise ValueError(f"{name} is not a renderer: give characters.")
    return Characters()


def install() -> None:
    """Stand in for `app.environment.rendering` in this process."""
    module = types.ModuleType("app.environment.rendering")
    vars(module)["renderer_for"] = renderer_for
    sys.modules["app.environment.rendering"] = module
