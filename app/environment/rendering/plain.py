"""Plain text: a sequence is the text of all messages and replies, one after the other.

    question │ reply <eos> │ observation │ reply <eos>

A reply ends at an end-of-sequence token. There are no roles, no reasoning and no tool calls.
"""

from collections.abc import Sequence
from pathlib import Path

from app.environment.protocol import Message, Reply, Tools
from app.environment.rendering.tokenizer_file import TokenizerFile


class PlainRenderer:
    """Messages without a chat template."""

    tool_syntax = None

    def __init__(self, folder: Path) -> None:
        self._tokenizer = TokenizerFile(folder)

    def opening(self, messages: Sequence[Message], tools: Tools | None = None) -> list[int]:
        """Return the prompt, with the special tokens that the tokenizer adds by default."""
        if tools:
            raise ValueError(
                "data.template=plain has no tool calls: give data.template=chat and a model with a chat template."
            )
        return self._tokenizer.encode(_text(messages), add_special_tokens=True)

    def following(
        self, token_ids: Sequence[int], messages: Sequence[Message], tools: Tools | None = None
    ) -> list[int] | None:
        """Return the new messages' tokens, after the end-of-sequence token that a truncated reply lacks."""
        if any(message["role"] == "assistant" for message in messages):
            return None

        tokenizer = self._tokenizer
        close: list[int] = []
        if tokenizer.eos_token_id is not None and token_ids and token_ids[-1] not in tokenizer.stop_ids:
            close = [tokenizer.eos_token_id]
        return close + tokenizer.encode(_text(messages))

    def parse(self, token_ids: Sequence[int], prompt_ids: Sequence[int] = (), tools: Tools | None = None) -> Reply:
        """Return the reply's text without special tokens."""
        text = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return Reply(text, "", (), truncated=False, token_ids=tuple(token_ids))

    def read(self, token_ids: Sequence[int]) -> list[Message]:
        """Return the text as one message of the user; there are no roles."""
        text = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return [{"role": "user", "content": text}] if text else []


def _text(messages: Sequence[Message]) -> str:
    return "".join(str(message["content"]) for message in messages)
