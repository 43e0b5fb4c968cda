"""From a question to token ids: plain text, or the tokenizer's chat template.

Always holds: the chat template's own special tokens are the only ones in a chat prompt; a plain prompt gets those that
the tokenizer adds by itself (a beginning-of-sequence token, where it has one).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from app.config.data import DataConfig, Template
from app.errors import ConfigError, expect


def encode(questions: Sequence[str], config: DataConfig, tokenizer: Any) -> list[np.ndarray]:
    """Token ids of every question's prompt, each [P] int32.

    `tokenizer` is any Hugging Face tokenizer. A chat template that is missing or refuses the messages is a
    `ConfigError`.
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
            "plain, since this model's tokenizer has no chat template",
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
            f"refuses these ({error})."
        ) from error
