"""Position of a run in its training data: an endless, resumable stream of prompts.

The order of an epoch depends only on (seed, epoch). The whole state is therefore an epoch, a position in its order,
and the ids of unfinished prompts.

    dispatched → consumed (trained on, or filtered: never dispatched again)
               → requeued (dispatched again before any new prompt)

Invariants:
- Within an epoch every prompt is dispatched exactly once, plus once for each time it was requeued.
- A restored cursor first dispatches the prompts that were in flight when its state was saved, then the requeued ones,
  then new ones.
"""

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from app.errors import ConfigError
from app.types import Prompt


class PromptCursor(Iterator[Prompt]):
    """An endless iterator over prompts, which appends the epoch to their ids: "gsm8k/3" → "gsm8k/3@0".

    Every dispatched prompt is in flight until it is marked as consumed or requeued:

        cursor = PromptCursor(prompts, seed=0, shuffle=True)
        first, second = cursor.take(2)      # "gsm8k/17@0", "gsm8k/4@0"
        cursor.mark_consumed([first.id])    # trained on
        cursor.requeue([second.id])         # next(cursor) returns it again
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool) -> None:
        self._prompts = list(prompts)
        self._rows = {prompt.id: row for row, prompt in enumerate(self._prompts)}
        if not self._prompts or len(self._rows) != len(self._prompts):
            raise ValueError("a cursor needs at least one prompt, and unique prompt ids")

        self._seed = seed
        self._shuffle = shuffle
        self._fingerprint = _fingerprint(self._prompts, seed, shuffle)

        # Ids in flight, in dispatch order. A dict serves as an ordered set.
        self._in_flight: dict[str, None] = {}
        self._requeued: deque[str] = deque()
        self._epoch = 0
        self._position = 0  # prompts of `_epoch` dispatched so far
        self._order = self._order_of(0)

    def __len__(self) -> int:
        """Prompts per epoch."""
        return len(self._prompts)

    def __next__(self) -> Prompt:
        """Dispatch the next prompt: a requeued one if there is any, else a new one."""
        prompt = self.prompt(self._requeued.popleft()) if self._requeued else self._next_new()
        self._in_flight[prompt.id] = None
        return prompt

    def _next_new(self) -> Prompt:
        if self._position == len(self):
            self._epoch += 1
            self._position = 0
            self._order = self._order_of(self._epoch)

        prompt = self._prompts[self._order[self._position]]
        self._position += 1
        return replace(prompt, id=f"{prompt.id}@{self._epoch}")

    def take(self, count: int) -> list[Prompt]:
        """Dispatch the next `count` prompts."""
        return [next(self) for _ in range(count)]

    @property
    def epoch(self) -> float:
        """Epochs dispatched so far, including the fraction of the current one."""
        return self._epoch + self._position / len(self)

    def prompt(self, prompt_id: str) -> Prompt:
        """Look up a dispatched prompt by id. Raises `KeyError` for any other id."""
        return replace(self._prompts[self._row(prompt_id)], id=prompt_id)

    def mark_consumed(self, prompt_ids: Sequence[str]) -> None:
        """Finish trained or filtered prompts. Raises `KeyError` if one is not in flight."""
        self._remove(prompt_ids)

    def requeue(self, prompt_ids: Sequence[str]) -> None:
        """Put prompts in flight at the head of the stream, in this order. Raises `KeyError` if one is not in flight."""
        self._remove(prompt_ids)
        self._requeued.extendleft(reversed(prompt_ids))

    def state(self) -> dict[str, Any]:
        """Return the state as JSON-serializable values. Prompts in flight count as unfinished."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "returned": [*self._in_flight, *self._requeued],
            "fingerprint": self._fingerprint,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. Raises `ConfigError` if it was saved over other prompts or in another order."""
        if state["fingerprint"] != self._fingerprint:
            raise ConfigError(
                "data does not match the checkpoint: give the same data set, template, rollout.max_prompt_tokens, "
                "seed and data.shuffle as the resumed run."
            )

        self._epoch = int(state["epoch"])
        self._position = int(state["position"])
        self._order = self._order_of(self._epoch)
        self._requeued = deque(state["returned"])
        self._in_flight = {}

    def _order_of(self, epoch: int) -> np.ndarray:
        """Rows in the order of this epoch: [prompts] int64."""
        if not self._shuffle:
            return np.arange(len(self))
        # The streams of the legacy generator are frozen, so checkpoints survive a newer numpy.
        return np.random.RandomState([self._seed, epoch]).permutation(len(self))

    def _row(self, prompt_id: str) -> int:
        """Row of a dispatched id. Raises `KeyError` for an id that was never dispatched."""
        base, _, epoch_text = prompt_id.rpartition("@")
        if base not in self._rows or not epoch_text.isdecimal():
            raise KeyError(f"no prompt {prompt_id}")

        row = self._rows[base]
        epoch = int(epoch_text)
        if epoch > self._epoch or (epoch == self._epoch and row in self._order[self._position :]):
            raise KeyError(f"prompt {prompt_id} was not dispatched yet")
        return row

    def _remove(self, prompt_ids: Sequence[str]) -> None:
        for prompt_id in prompt_ids:
            if prompt_id not in self._in_flight:
                raise KeyError(f"prompt {prompt_id} is not in flight")
            del self._in_flight[prompt_id]


def _fingerprint(prompts: Sequence[Prompt], seed: int, shuffle: bool) -> str:
    """Hash everything that determines the stream."""
    digest = hashlib.sha256(f"{seed} {shuffle} {len(prompts)}".encode())
    for prompt in prompts:
        digest.update(f"\n{prompt.id} {prompt.answer} ".encode())
        digest.update(prompt.token_ids.tobytes())
    return digest.hexdigest()[:16]
