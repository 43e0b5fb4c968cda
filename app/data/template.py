"""Encode questions as token ids: plain text, or the tokenizer's chat template.

Invariants:
- A chat prompt has only the special tokens of its template, and the text of every message but an assistant's.
- A plain prompt has the special tokens that the tokenizer adds by default (such as beginning-of-sequence).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from app.config.data import DataConfig, Template
from app.data.fields import Row
from app.data.records.messages import Message, WrongMessages, framed
from app.errors import ConfigError, expect


def encode(members: Sequence[Row], config: DataConfig, tokenizer: Any) -> list[np.ndarray]:
    """Encode the prompt of every row: [P] int32 each.

    Args:
        members: Rows, without prefix and suffix.
        config: Settings of `data=`.
        tokenizer: Any Hugging Face tokenizer.

    Raises:
        ConfigError: If the chat template is missing or rejects the messages.
    """
    if not members:
        return []

    chat = config.template is Template.chat
    if chat:
        expect(
            bool(getattr(tokenizer, "chat_template", None)),
            "data.template",
            config.template,
            "plain; this model's tokenizer has no chat template",
        )
        texts = [_render(row, config, tokenizer) for row in members]
    else:
        check(members, config)
        texts = [config.prefix + row.question + config.suffix for row in members]

    encoded = tokenizer(texts, add_special_tokens=not chat)["input_ids"]
    return [np.asarray(ids, dtype=np.int32) for ids in encoded]


def check(members: Sequence[Row], config: DataConfig) -> None:
    """Raise the `ConfigError` that `encode` would raise whatever the tokenizer is."""
    for row in members:
        if conversation(row, config) and config.template is Template.plain:
            why = f"data.question={config.question} holds messages in row {row.index + 1} of {row.source}"
            raise ConfigError("data.template", config.template, "chat, which renders messages", why)


def conversation(row: Row, config: DataConfig) -> tuple[Message, ...]:
    """Return the messages of a row whose question is a conversation, with what the data puts around them; else none.

    Raises:
        ConfigError: They have a system message, and `data.system` is another.
    """
    try:
        return framed(row.messages, config.system, config.prefix, config.suffix) if row.messages else ()
    except WrongMessages as error:
        accepted = f"{error}, as those of row {row.index + 1} of {row.source} have"
        raise ConfigError("data.system", config.system, accepted) from error


def _render(row: Row, config: DataConfig, tokenizer: Any) -> str:
    from jinja2.exceptions import TemplateError

    question = ({"role": "user", "content": row.question},)
    messages = conversation(row, config) or framed(question, config.system, config.prefix, config.suffix)
    try:
        text: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=config.thinking
        )
    except TemplateError as error:
        which = f"those of row {row.index + 1} of {row.source}" if row.messages else "these"
        why = f"the tokenizer's chat template rejects {which} ({error})"
        raise ConfigError("data.template", config.template, "plain, or other messages", why) from error

    if row.messages:
        _require_all(messages, text, row, config)
    return text


def _require_all(messages: Sequence[Message], text: str, row: Row, config: DataConfig) -> None:
    """Raise `ConfigError` if the template left a message out. Of an assistant's it may leave out the reasoning."""
    for message in messages:
        if message["role"] != "assistant" and message["content"].strip() not in text:
            accepted = "messages that the model's chat template renders"
            why = f"it leaves out that of the role {message['role']} in row {row.index + 1} of {row.source}"
            raise ConfigError("data.question", config.question, accepted, why)
