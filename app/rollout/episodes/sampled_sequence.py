"""One sequence of an episode, as the driver sees it: what its requests began with, and what was sampled for them."""

from collections.abc import Sequence

import numpy as np

from app.types import Completion, TokenSequence, VersionSpan


class SampledSequence:
    """Collects the completions of one sequence, whose context the environment worker holds.

    sequence = SampledSequence()
    sequence.begin([1, 2, 3])                # the opening
    sequence.add(completion)                 # 4 sampled tokens
    sequence.begin([1, 2, 3, *sampled, 9])   # everything so far and an observation
    sequence.tokens, sequence.response_tokens   # 8, 5
    """

    def __init__(self) -> None:
        self.context = np.zeros(0, dtype=np.int32)  # [L] all tokens of the last request
        self.tokens = 0
        self.opening_tokens = 0  # before the first sampled one
        self._starts: list[int] = []  # of each completion in the sequence
        self._completions: list[Completion] = []  # that are not empty
        self._token_ids = self.context  # up to the end of the last of them

    @property
    def response_tokens(self) -> int:
        return self.tokens - self.opening_tokens

    @property
    def is_sampled(self) -> bool:
        return bool(self._completions)

    def begin(self, context: Sequence[int]) -> None:
        """Begin a request with all tokens of the sequence."""
        self.context = np.asarray(context, dtype=np.int32)
        self.tokens = len(context)
        if not self.is_sampled:
            self.opening_tokens = self.tokens

    def add(self, completion: Completion) -> None:
        """Add what an engine sampled after the context."""
        if not len(completion.token_ids):
            return
        self._starts.append(len(self.context))
        self._completions.append(completion)
        self._token_ids = np.concatenate([self.context, completion.token_ids])
        self.tokens = len(self._token_ids)

    def join(self) -> TokenSequence:
        """Return the sequence up to its last sampled token. Needs at least one."""
        sampled = np.zeros(len(self._token_ids), dtype=bool)
        spans: list[VersionSpan] = []
        begin = 0  # sampled tokens before a completion
        for start, completion in zip(self._starts, self._completions, strict=True):
            end = start + len(completion.token_ids)
            assert np.array_equal(self._token_ids[start:end], completion.token_ids), "the worker changed sampled tokens"
            sampled[start:end] = True

            for span in completion.spans:
                if spans and spans[-1].version == span.version:
                    spans[-1] = VersionSpan(span.version, spans[-1].start, begin + span.end)
                elif span.end > span.start:
                    spans.append(VersionSpan(span.version, begin + span.start, begin + span.end))
            begin += len(completion.token_ids)

        logprobs = np.concatenate([completion.logprobs for completion in self._completions])
        return TokenSequence(self._token_ids, sampled, logprobs, tuple(spans))
