"""Encode questions as token ids: plain text, or the tokenizer's chat template.

Invariants:
- A chat prompt has only the special tokens of its template.
- A plain prompt has the special tokens that the tokenizer adds by default (such as beginning-of-sequence).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from app.config.data import DataConfig, Template
from app.errors import ConfigError, expect


def encode(questions: Sequence[str], config: DataConfig, tokenizer: Any) -> list[np.ndarray]:
    """Encode the prompt of every question: [P] int32 each.

    Args:
        questions: Questions without prefix and suffix.
        config: Settings of `data=`.
        tokenizer: Any Hugging Face tokenizer.

    Raises:
        ConfigError: If the chat template is missing or rejects the messages.
    """
    if not questions:
        return []

    texts = [config.prefix + question + config.suffix for question in questions]
    chat = config.template is Template.chat
    if chat:
        expect(
            bool(getattr(tokenizer, "chat_template", None)),
            "data.template",
            config.template,
            "plain; this model's tokenizer has no chat template",
        )
        texts = [_render(text, config, tokenizer) for text in texts]

    encoded = tokenizer(texts, add_special_tokens=not chat)["input_ids"]
    return [np.asarray(ids, dtype=np.int32) for ids in encoded]


def _render(text: str, config: DataConfig, tokenizer: Any) -> str:
    from jinja2.exceptions import TemplateError

    system = [] if config.system is None else [{"role": "system", "content": config.system}]
    messages = [*system, {"role": "user", "content": text}]

    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=config.thinking
        )
    except TemplateError as error:
        raise ConfigError(
            f"data.template=chat is not accepted: give plain, or other messages; the tokenizer's chat template "
            f"rejects these ({error})."
        ) from error
