"""A sequence while its episode is played: appended to, never rendered again."""

from collections.abc import Sequence

import numpy as np

from app.types import Completion, TokenSequence, VersionSpan


class SequenceBuilder:
    """The tokens of one sequence so far.

        sequence = SequenceBuilder()
        sequence.append([1, 2, 3])        # the opening
        sequence.add(completion)          # 4 sampled tokens
        sequence.append([9])              # an observation
        sequence.tokens, sequence.response_tokens   # 8, 5

    Attributes:
        tokens: Tokens so far.
        opening_tokens: Tokens before the first sampled one.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.opening_tokens = 0
        self._pieces: list[np.ndarray] = []  # int32; together all tokens
        self._lengths: list[int] = []  # of what was added, in order
        self._sampled: list[bool] = []  # of the same
        self._logprobs: list[np.ndarray] = []  # of the sampled pieces
        self._spans: list[VersionSpan] = []  # of the sampled tokens

    @property
    def response_tokens(self) -> int:
        """Tokens after the opening."""
        return self.tokens - self.opening_tokens

    @property
    def sampled_tokens(self) -> int:
        return self._spans[-1].end if self._spans else 0

    def append(self, token_ids: Sequence[int]) -> None:
        """Add tokens that were not sampled."""
        self._add(np.asarray(token_ids, dtype=np.int32), sampled=False)
        if not any(self._sampled):
            self.opening_tokens = self.tokens

    def add(self, completion: Completion) -> None:
        """Add what an engine sampled after all tokens so far."""
        start = self.sampled_tokens
        self._add(completion.token_ids, sampled=True)
        self._logprobs.append(completion.logprobs)
        for span in completion.spans:
            self._add_span(VersionSpan(span.version, start + span.start, start + span.end))

    def token_ids(self) -> np.ndarray:
        """Return all tokens so far, [L] int32. The next request begins with them."""
        whole = np.concatenate(self._pieces)
        self._pieces = [whole]
        return whole

    def build(self) -> TokenSequence:
        """Return the sequence, without the tokens after the last sampled one."""
        mask = np.repeat(self._sampled, self._lengths)
        end = int(np.flatnonzero(mask)[-1]) + 1 if mask.any() else self.tokens
        logprobs = np.concatenate([np.zeros(0, dtype=np.float32), *self._logprobs])
        return TokenSequence(self.token_ids()[:end], mask[:end], logprobs, tuple(self._spans))

    def _add(self, token_ids: np.ndarray, *, sampled: bool) -> None:
        self._pieces.append(token_ids)
        self._sampled.append(sampled)
        self._lengths.append(len(token_ids))
        self.tokens += len(token_ids)

    def _add_span(self, span: VersionSpan) -> None:
        """Add a span; one of the version of the last one extends it."""
        last = self._spans[-1] if self._spans else None
        if last is not None and last.version == span.version:
            self._spans[-1] = VersionSpan(span.version, last.start, span.end)
        elif span.end > span.start or last is None:
            self._spans.append(span)
