"""Messages as token ids and back, in an environment's worker process: by the model's chat template, or as plain text.

    sequence     ┌── opening ──┐┌─ reply 1 ─┐┌─ following ─┐┌─ reply 2 ─┐
               prompt tokens   sampled      not sampled    sampled

Invariants:
- Sampled tokens are never tokenized again: `following` returns tokens to append, or None where the template would
  rewrite what stands in the sequence, and then a new sequence begins.
- Importing this package imports the standard library only; no renderer imports torch or transformers.

`environment.thinking` acts in `chat.py`.
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from app.environment.protocol import Message, Renderer, Reply, Tools
from app.environment.rendering.tokenizer_file import TokenizerFile

PLAIN, CHAT = "plain", "chat"


@lru_cache(maxsize=4)
def renderer_for(
    name: str,
    model_path: str,
    thinking: str = "template",
    enable_thinking: bool = False,
    template: str | None = None,
    variables: str = "{}",
) -> Renderer:
    """Load a renderer, see `RendererChoice`. The same arguments give the same object.

    Raises `ValueError`, one sentence: no tokenizer, a missing package, or an unusable template.
    """
    if name == PLAIN:
        return PlainRenderer(Path(model_path))

    from app.environment.rendering.chat import ChatRenderer

    return ChatRenderer(Path(model_path), thinking == "keep", enable_thinking, template, json.loads(variables))


class PlainRenderer:
    """Plain text: a sequence is the text of all messages and replies, one after the other.

        question │ reply <eos> │ observation │ reply <eos>

    A reply ends at an end-of-sequence token. There are no roles, no reasoning and no tool calls.
    """

    tool_syntax = None

    def __init__(self, folder: Path) -> None:
        self._tokenizer = TokenizerFile(folder)

    def opening(self, messages: Sequence[Message], tools: Tools | None = None) -> list[int]:
        if tools:
            raise ValueError(
                "data.template=plain has no tool calls: give data.template=chat and a model with a chat template."
            )
        return self._tokenizer.encode(_text(messages), add_special_tokens=True)

    def following(
        self, token_ids: Sequence[int], messages: Sequence[Message], tools: Tools | None = None
    ) -> list[int] | None:
        if any(message["role"] == "assistant" for message in messages):
            return None

        tokenizer = self._tokenizer
        close: list[int] = []
        if tokenizer.eos_token_id is not None and token_ids and token_ids[-1] not in tokenizer.stop_ids:
            close = [tokenizer.eos_token_id]
        return close + tokenizer.encode(_text(messages))

    def parse(self, token_ids: Sequence[int], prompt_ids: Sequence[int] = (), tools: Tools | None = None) -> Reply:
        return Reply(self.decode(token_ids), "", (), truncated=False, token_ids=tuple(token_ids))

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)


def _text(messages: Sequence[Message]) -> str:
    return "".join(str(message["content"]) for message in messages)
