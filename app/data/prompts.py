"""Build all prompts of a run: rows → template → token ids → training stream and evaluation sets.

Invariants:
- No prompt is longer than `max_prompt_tokens`. Longer prompts are dropped and counted.
- A chat prompt has only the special tokens of its template, and the text and the calls of every message. A special
  token that a message spells is text, see `ControlTokens`; the first row where it cannot be is named.
- A plain prompt has the special tokens that the tokenizer adds by default (such as beginning-of-sequence).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np

from app.config.data import DataConfig, Template
from app.data import rows
from app.data.counts import RowCounts
from app.data.cursor import PromptCursor
from app.data.row import Row
from app.data.rows import DataRows
from app.errors import ConfigError, expect, one_line
from app.types import Prompt
from app.utils.chat_messages import FIELDS, MARK, ControlTokens, Message, encode_marked, for_template, lost


def encode(members: Sequence[Row], config: DataConfig, tokenizer: Any) -> list[np.ndarray]:
    """Encode the prompt of every row: [P] int32 each. Raises `ConfigError` if the chat template does not fit."""
    if not members:
        return []

    chat = config.template is Template.chat
    if chat:
        accepted = "plain; this model's tokenizer has no chat template"
        expect(bool(getattr(tokenizer, "chat_template", None)), "data.template", config.template, accepted)
        texts = [_render(row, config, tokenizer) for row in members]
    else:
        check_template(members, config)
        texts = [config.prefix + row.question + config.suffix for row in members]

    encoded = tokenizer(texts, add_special_tokens=not chat)["input_ids"]
    for index, text in enumerate(texts if chat else ()):
        if MARK in text:
            encoded[index] = encode_text(text, tokenizer)
    return [np.asarray(ids, dtype=np.int32) for ids in encoded]


def encode_text(text: str, tokenizer: Any) -> list[int]:
    """Encode a rendered text, which may have marks."""
    return encode_marked(text, lambda piece: tokenizer(piece, add_special_tokens=False)["input_ids"])


@lru_cache(maxsize=4)
def control_tokens(tokenizer: Any) -> ControlTokens:
    """Return the special tokens of a Hugging Face tokenizer."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return ControlTokens.of(added, lambda text: encode_text(text, tokenizer), tokenizer.decode)


def check_template(members: Sequence[Row], config: DataConfig) -> None:
    """Raise the `ConfigError` that `encode` would raise whatever the tokenizer is."""
    for row in members:
        if conversation(row, config) and config.template is Template.plain:
            why = f"data.question={config.question} holds messages in row {row.index + 1} of {row.source}"
            raise ConfigError("data.template", config.template, "chat, which renders messages", why)


def conversation(row: Row, config: DataConfig) -> tuple[Message, ...]:
    """Return the framed messages of a row, if it has some. Raises `ConfigError` if two system messages would meet."""
    if config.system is not None and any(message["role"] in ("system", "developer") for message in row.messages):
        accepted = f"null where messages have one of their own, as those of row {row.index + 1} of {row.source}"
        raise ConfigError("data.system", config.system, accepted)
    return framed(row.messages, config) if row.messages else ()


def framed(messages: Sequence[Message], config: DataConfig) -> tuple[Message, ...]:
    """Add the data set's framing to messages: a leading system message, and text around the last user message."""
    found = list(messages)
    if users := [index for index, message in enumerate(found) if message["role"] == "user"]:
        last = found[users[-1]]
        found[users[-1]] = {**last, "content": f"{config.prefix}{last['content']}{config.suffix}"}
    return tuple(found) if config.system is None else ({"role": "system", "content": config.system}, *found)


@dataclass(frozen=True, slots=True)
class Renderer:
    """Renders the messages of one row by the chat template of a Hugging Face tokenizer."""

    config: DataConfig
    tokenizer: Any
    template_kwargs: Mapping[str, Any]  # of the row
    name: str  # of the row, in errors

    def text(self, messages: Sequence[Message], *, reply: bool = True) -> str:
        """Render messages; `reply` opens the policy's reply. Raises `ConfigError` if the template rejects them."""
        config = self.config
        variables = {"enable_thinking": config.thinking, **config.chat_template_kwargs, **self.template_kwargs}
        try:
            text: str = self.tokenizer.apply_chat_template(
                for_template(messages), tokenize=False, add_generation_prompt=reply, **variables
            )
        except Exception as error:  # the template is a program of the model's
            why = f"the tokenizer's chat template rejects those of {self.name} ({one_line(error)})"
            raise ConfigError("data.template", config.template, "plain, or other messages", why) from error
        return text

    def require_whole(self, messages: Sequence[Message], number: int, text: str, *, reply: bool = True) -> None:
        """Raise `ConfigError` if a rendered text lacks a part of a message, see `lost`.

        A reply in a prompt may lose its reasoning; a reply to imitate (`reply=False`) may not.
        """
        part = lost(messages, number, text, partial(self.text, reply=reply), thoughts=not reply)
        if part is not None:
            accepted = "messages that the model's chat template renders, or another model.chat_template"
            why = f"it leaves out the {part} of message {number + 1} of the role {messages[number]['role']}"
            raise ConfigError("data.question", self.config.question, accepted, f"{why} in {self.name}")


def _render(row: Row, config: DataConfig, tokenizer: Any) -> str:
    messages = conversation(row, config) or framed(({"role": "user", "content": row.question},), config)
    messages = control_tokens(tokenizer).marked(messages)
    renderer = Renderer(config, tokenizer, row.template_kwargs, f"row {row.index + 1} of {row.source}")
    text = renderer.text(messages)
    for number in range(len(messages)) if row.messages else ():
        renderer.require_whole(messages, number, text)
    return text


@dataclass(frozen=True, slots=True)
class PromptData:
    """All prompts of a run."""

    train: PromptCursor
    evals: dict[str, list[Prompt]]  # by evaluation set; ids are "<set>/<row>@eval"
    counts: RowCounts  # of the prompts that are used
    dropped: int  # prompts above the length limit, over all sets
    total: int  # prompts before that
    warnings: list[str]  # for the run to record

    @property
    def all(self) -> list[Prompt]:
        return [*self.train.prompts, *(prompt for prompts in self.evals.values() for prompt in prompts)]


def build(
    config: DataConfig, tokenizer: Any, *, seed: int, max_prompt_tokens: int, loaded: DataRows | None = None
) -> PromptData:
    """Load, template and tokenize all rows; `loaded` has them where they are loaded already.

    Prompts above `max_prompt_tokens` are dropped. Raises `ConfigError` for data that cannot be used.
    """
    loaded = loaded or rows.load(config)
    train = prompts_of(loaded.train, config, tokenizer)
    evals = {name: prompts_of(each, config, tokenizer, set_name=name) for name, each in loaded.evals.items()}
    total = len(train) + sum(map(len, evals.values()))

    kept = within_limit(train, max_prompt_tokens, "the training set")
    sources = {prompt.source for prompt in kept}
    for name in config.train_sets:
        accepted = f"more, or leave out data.train_sets.{name}, whose prompts are all too long"
        expect(name in sources, "rollout.max_prompt_tokens", max_prompt_tokens, accepted)
    evals = {name: within_limit(each, max_prompt_tokens, f"evaluation set {name}") for name, each in evals.items()}

    cursor = PromptCursor(kept, seed=seed, shuffle=config.shuffle, weights=config.weights)
    counts = RowCounts.of(kept, evals, loaded, config.weights)
    dropped = total - len(kept) - sum(map(len, evals.values()))
    return PromptData(cursor, evals, counts, dropped, total, loaded.warnings)


def within_limit(prompts: Sequence[Prompt], max_prompt_tokens: int, label: str) -> list[Prompt]:
    """Return the prompts that are not too long. Raises `ConfigError` if there are none."""
    accepted = [prompt for prompt in prompts if len(prompt.token_ids) <= max_prompt_tokens]
    if not accepted:
        shortest = min(len(prompt.token_ids) for prompt in prompts)
        least = f"at least {shortest}, the length of the shortest prompt of {label}"
        raise ConfigError("rollout.max_prompt_tokens", max_prompt_tokens, least, "all its prompts are too long")
    return accepted


def rendering_warnings(prompts: Sequence[Prompt], config: DataConfig, tokenizer: Any) -> list[str]:
    """Return sentences about fields of messages that nothing reads, and about control tokens in their text.

    The tokenizer cannot read those tokens as text.
    """
    if config.template is Template.plain:
        return []
    control = control_tokens(tokenizer).others
    unread: set[str] = set()
    spelled: dict[str, str] = {}
    for prompt in prompts:
        unread.update(*prompt.messages, prompt.reply or ())
        for message in prompt.messages or ({"content": prompt.question},):
            if found := control.search(message["content"]):
                spelled.setdefault(found[0], prompt.id)
    unread -= {*FIELDS, *(name for name in unread if name in str(tokenizer.chat_template))}
    names = ", ".join(sorted(unread))
    warnings = [f"neither the chat template nor a run reads these fields of messages: {names}"] if unread else []
    reads = "in its text, which this tokenizer reads as its control token"
    return warnings + [f"{name} spells {token} {reads}" for token, name in spelled.items()]


def prompts_of(
    members: Sequence[Row], config: DataConfig, tokenizer: Any, *, set_name: str | None = None
) -> list[Prompt]:
    """Return the prompts of rows of an evaluation set, or of training rows. Raises `ConfigError` as `build` does."""
    prompts = []
    for row, token_ids in zip(members, encode(members, config, tokenizer), strict=True):
        if not len(token_ids):
            accepted = "text that the model's tokenizer can encode"
            why = f"row {row.index + 1} of {row.source} has no tokens"
            raise ConfigError("data.question", config.question, accepted, why)

        # The cursor appends the epoch to the id of a training prompt.
        name = f"{row.source}/{row.index}"
        if set_name is not None:
            # Held-out rows of several training sets may have the same index.
            name = f"{set_name}/{name if row.source in config.train_sets else row.index}@eval"
        prompts.append(
            Prompt(
                id=name,
                token_ids=token_ids,
                answer=row.answer,
                source=row.source,
                question=row.question,
                row=row.columns,
                messages=conversation(row, config),
                reply=row.reply,
                template_kwargs=row.template_kwargs,
            )
        )
    return prompts
