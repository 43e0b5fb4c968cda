"""Demonstrations as sequences to imitate: a prompt and its reply, in the tokens that a rollout would have.

    plain   prompt tokens │ reply, end of text
    chat    rendered up to the reply │ reply … token that ends it │ next messages │ …     by the model's chat template

Invariants:
- Text on either side of a border is encoded on its own, as prompts and completions are.
- An imitated span begins where the policy would begin to sample, and ends with a token that ends a completion.
- Earlier replies of a conversation are imitated too, but not those that the template writes in another way once
  messages follow (reasoning that it leaves out).
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np

from app.config.data import DataConfig, Template
from app.data.cursor import Epochs, fingerprint, require_same
from app.data.prompts import Renderer, control_tokens, encode_text, framed, prompts_of, within_limit
from app.data.row import Row
from app.errors import ConfigError
from app.types import Prompt, TokenSequence
from app.utils.chat_messages import CLOSE, REASONING, REPLY, Message

EMPTY_BLOCK = re.compile(r"<think>\s*</think>\s*")
OPENED_BLOCK = re.compile(r"<think>\s*(</think>\s*)?$")
Piece = tuple[list[int], bool]  # token ids, and whether they are imitated


@dataclass(frozen=True, slots=True)
class Demonstrator:
    """Turns prompts with a reply into sequences."""

    config: DataConfig
    tokenizer: Any
    stop_ids: Sequence[int]  # tokens that end a completion
    max_tokens: int  # longer sequences are cut

    @property
    def _stops(self) -> list[str]:
        return [self.tokenizer.decode([token]) for token in self.stop_ids]

    def sequences(self, prompts: Iterable[Prompt]) -> list[TokenSequence]:
        """Return one sequence for each prompt. Raises `ConfigError` if the chat template does not end a reply."""
        return [self._sequence(prompt) for prompt in prompts]

    def count_cut(self, prompts: Iterable[Prompt]) -> int:
        """Return how many demonstrations are too long. Raises as `sequences` does."""
        return sum(sum(len(ids) for ids, _ in self._pieces(prompt)) > self.max_tokens for prompt in prompts)

    def _sequence(self, prompt: Prompt) -> TokenSequence:
        pieces = self._pieces(prompt)
        token_ids = np.array([token for ids, _ in pieces for token in ids], dtype=np.int32)
        imitated = np.array([marked for ids, marked in pieces for _ in ids], dtype=bool)
        return TokenSequence.demonstration(token_ids[: self.max_tokens], imitated[: self.max_tokens])

    def _pieces(self, prompt: Prompt) -> list[Piece]:
        assert prompt.reply is not None
        if self.config.template is Template.plain:
            end = self.tokenizer.eos_token_id
            reply = encode_text(prompt.reply["content"], self.tokenizer)
            return [(prompt.token_ids.tolist(), False), ([*reply, *([] if end is None else [end])], True)]

        config = self.config
        messages = prompt.messages or framed(({"role": "user", "content": prompt.question},), config)
        return self._chat_pieces([*messages, prompt.reply], prompt)

    def _chat_pieces(self, messages: Sequence[Message], prompt: Prompt) -> list[Piece]:
        """Cut a rendered conversation at the borders of its replies."""
        renderer = Renderer(self.config, self.tokenizer, prompt.template_kwargs, prompt.id)
        trained = [index for index, each in enumerate(messages) if index and each.get("train", each["role"] == REPLY)]
        last = trained[-1]
        messages = control_tokens(self.tokenizer).marked(messages[: last + 1])
        whole = renderer.text(messages, reply=False)
        stops = self._stops
        pieces: list[Piece] = []
        done = 0
        for index in trained[-1:] if self.config.last_reply_only else trained:
            message = messages[index]
            # What a policy would have sampled: the reply as it is written when no message follows.
            opened = renderer.text(messages[:index])
            alone = renderer.text(messages[: index + 1], reply=False)
            start, end = _borders(opened, whole, stops)
            begin, close = _borders(opened, alone, stops)
            as_sampled = end and EMPTY_BLOCK.sub("", whole[:end]) == EMPTY_BLOCK.sub("", alone[:close])
            if index < last and not as_sampled:
                continue

            renderer.require_whole(messages[: index + 1], index, alone, reply=False)
            self._require_imitable(message, opened[begin:], () if close else stops, prompt)
            context, sampled = (encode_text(each, self.tokenizer) for each in (whole[done:start], whole[start:end]))
            pieces += [(context, False), (sampled, True)]
            done = end
        return pieces

    def _require_imitable(self, message: Message, unread: str, stops: Sequence[str], prompt: Prompt) -> None:
        """Raise `ConfigError` if a reply holds a stop, or the template does not end it or begin it as a policy does.

        Args:
            unread: Text that precedes the policy's first token but not the reply.
            stops: Texts that end a reply, if the template writes none of them; else empty.
        """
        if stops:
            why = f"it does not end the reply of {prompt.id} with {' or '.join(stops)}, which ends a completion"
            raise ConfigError("data.template", self.config.template, "plain, or another chat template", why)
        if found := next((stop for stop in self._stops if stop in message["content"]), None):
            raise ConfigError("data.question", self.config.question, f"replies without {found}, unlike {prompt.id}")
        # The template of a later reply may lack the empty block that a prompt of no thinking has.
        if EMPTY_BLOCK.sub("", unread):
            thinks = CLOSE in message["content"] or REASONING[0] in message
            accepted = "true, or replies without reasoning" if thinks else "false, or replies with reasoning"
            why = f"the policy samples after {unread!r}, which does not stand before the reply of {prompt.id}"
            raise ConfigError("data.thinking", self.config.thinking, accepted, why)


def _borders(opened: str, text: str, stops: Sequence[str]) -> tuple[int, int]:
    """Return where a reply begins after a prompt, or what both have in common, and where it ends: 0 if nowhere.

    A template may leave out the block of thinking that its prompt ends with; the reply may begin with `<` as well.
    """
    without = OPENED_BLOCK.sub("", opened)
    if not text.startswith((opened, f"{without}<think>")):
        opened = without
    start = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(opened, text, strict=False)))
    ends = [found + len(stop) for stop in stops if (found := text.find(stop, start)) >= 0]
    return start, min(ends, default=0)


class DemonstrationStream:
    """The demonstrations of each step of an RL run, in seeded epochs. They depend on the step's number alone."""

    def __init__(
        self, demonstrator: Demonstrator, rows: Sequence[Row], *, per_step: int, seed: int, max_prompt_tokens: int
    ) -> None:
        self.demonstrator = demonstrator
        prompts = prompts_of(rows, demonstrator.config, demonstrator.tokenizer)
        self.prompts = within_limit(prompts, max_prompt_tokens, "data.demonstrations")
        self.dropped = len(prompts) - len(self.prompts)
        shuffle = demonstrator.config.shuffle
        self.fingerprint = fingerprint(self.prompts, seed=seed, shuffle=shuffle)
        self._epochs = Epochs(self.prompts, seed=seed, shuffle=shuffle)
        self._per_step = per_step

    def require_same(self, saved: str) -> None:
        """Raise `ConfigError` unless this is the fingerprint of the same rows in the same order."""
        require_same(saved, self.fingerprint, "data.demonstrations", self.demonstrator.config.demonstrations)

    def of_step(self, step: int) -> list[TokenSequence]:
        """Return the sequences of a step, which is counted from 1."""
        self._epochs.restore(*divmod((step - 1) * self._per_step, len(self._epochs)))
        return self.demonstrator.sequences(next(self._epochs) for _ in range(self._per_step))
