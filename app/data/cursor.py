"""Position of a run in its training data: an endless, resumable stream of prompts.

The order of an epoch depends only on (seed, epoch). The whole state is therefore an epoch and a position in its order,
of each training set, and the ids of unfinished prompts. The next prompt comes from the set that is furthest behind its
share of the prompts dispatched so far, so that each step has the same proportions:

    weights 2 : 1  →  a b a a b a a b a …

    dispatched → consumed (trained on, or filtered: never dispatched again)
               → requeued (dispatched again before any new prompt)

Invariants:
- The order depends only on prompts, weights, seed and `shuffle`. Each set is dispatched in whole epochs of its own: a
  small set with a large weight is repeated, none is cut short.
- Within an epoch of its set every prompt is dispatched exactly once, plus once for each time it was requeued.
- A restored cursor first dispatches the prompts that were in flight when its state was saved, then the requeued ones,
  then new ones.
"""

import hashlib
import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from app.errors import ConfigError
from app.types import Prompt

ONLY = ""  # name of the set of a run without weights


class Epochs(Iterator[Prompt]):
    """Endless epochs over one set of prompts, which appends the epoch, from 0, to their ids."""

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool) -> None:
        self._prompts = list(prompts)
        self._rows = {prompt.id: row for row, prompt in enumerate(self._prompts)}
        self._seed = seed
        self._shuffle = shuffle
        self.restore(0, 0)

    def __len__(self) -> int:
        return len(self._prompts)

    def __next__(self) -> Prompt:
        if self.position == len(self):
            self.restore(self.epoch + 1, 0)

        prompt = self._prompts[self._order[self.position]]
        self.position += 1
        return replace(prompt, id=f"{prompt.id}@{self.epoch}")

    @property
    def dispatched(self) -> int:
        """Prompts dispatched so far, in all epochs."""
        return self.epoch * len(self) + self.position

    def restore(self, epoch: int, position: int) -> None:
        """Continue from a position in an epoch."""
        self.epoch = epoch
        self.position = position  # prompts of this epoch dispatched so far
        # The streams of the legacy generator are frozen, so checkpoints survive a newer numpy.
        drawn = np.random.RandomState([self._seed, epoch]).permutation(len(self)) if self._shuffle else None
        self._order = np.arange(len(self)) if drawn is None else drawn

    def prompt(self, prompt_id: str) -> Prompt:
        """Look up a dispatched prompt by id. Raises `KeyError` for any other id."""
        base, _, epoch_text = prompt_id.rpartition("@")
        if base not in self._rows or not epoch_text.isdecimal():
            raise KeyError(f"no prompt {prompt_id}")

        row = self._rows[base]
        epoch = int(epoch_text)
        if epoch > self.epoch or (epoch == self.epoch and row in self._order[self.position :]):
            raise KeyError(f"prompt {prompt_id} was not dispatched yet")
        return replace(self._prompts[row], id=prompt_id)


class PromptCursor(Iterator[Prompt]):
    """An endless iterator over prompts, which appends the epoch to their ids: "gsm8k/3" → "gsm8k/3@0".

    Every dispatched prompt is in flight until it is marked as consumed or requeued:

        cursor = PromptCursor(prompts, seed=0, shuffle=True)
        first, second = cursor.take(2)      # "gsm8k/17@0", "gsm8k/4@0"
        cursor.mark_consumed([first.id])    # trained on
        cursor.requeue([second.id])         # next(cursor) returns it again

    With `shuffle` each epoch of a set has another order, seeded by `seed`. `weights` by source mix several training
    sets; without weights all prompts are one set.
    """

    def __init__(
        self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool, weights: Mapping[str, float] | None = None
    ) -> None:
        if not prompts or len({prompt.id for prompt in prompts}) != len(prompts):
            raise ValueError("a cursor needs at least one prompt, and unique prompt ids")

        self.prompts = prompts
        self._fingerprint = fingerprint(prompts, seed=seed, shuffle=shuffle, weights=weights)

        weights = weights or {ONLY: 1.0}
        members: dict[str, list[Prompt]] = {name: [] for name in weights}
        for prompt in prompts:
            members[ONLY if ONLY in weights else prompt.source].append(prompt)
        self._sets = {name: Epochs(each, seed=seed, shuffle=shuffle) for name, each in members.items()}
        total = sum(weights.values())
        self._shares = {name: weight / total for name, weight in weights.items()}

        # Ids in flight, in dispatch order. A dict serves as an ordered set.
        self._in_flight: dict[str, None] = {}
        self._requeued: deque[str] = deque()

    def __len__(self) -> int:
        return len(self.prompts)

    def __next__(self) -> Prompt:
        """Dispatch the next prompt: a requeued one if there is any, else one of the set furthest behind its share."""
        if self._requeued:
            prompt = self.prompt(self._requeued.popleft())
        else:
            total = sum(each.dispatched for each in self._sets.values()) + 1
            behind = {name: self._shares[name] * total - each.dispatched for name, each in self._sets.items()}
            prompt = next(self._sets[max(behind, key=behind.__getitem__)])

        self._in_flight[prompt.id] = None
        return prompt

    def take(self, count: int) -> list[Prompt]:
        return [next(self) for _ in range(count)]

    def prompt(self, prompt_id: str) -> Prompt:
        """Look up a dispatched prompt by id. Raises `KeyError` for any other id."""
        source = ONLY if ONLY in self._sets else prompt_id.partition("/")[0]
        if source not in self._sets:
            raise KeyError(f"no prompt {prompt_id}")
        return self._sets[source].prompt(prompt_id)

    def mark_consumed(self, prompt_ids: Sequence[str]) -> None:
        """Finish trained or filtered prompts. Raises `KeyError` if one is not in flight."""
        for prompt_id in prompt_ids:
            if prompt_id not in self._in_flight:
                raise KeyError(f"prompt {prompt_id} is not in flight")
            del self._in_flight[prompt_id]

    def requeue(self, prompt_ids: Sequence[str]) -> None:
        """Put prompts in flight at the head of the stream, in this order. Raises `KeyError` if one is not in flight."""
        self.mark_consumed(prompt_ids)
        self._requeued.extendleft(reversed(prompt_ids))

    def state(self) -> dict[str, Any]:
        """Return the state as JSON-serializable values. Prompts in flight count as unfinished."""
        positions: dict[str, Any] = {"sets": {name: [each.epoch, each.position] for name, each in self._sets.items()}}
        if ONLY in self._sets:
            positions = {"epoch": self._sets[ONLY].epoch, "position": self._sets[ONLY].position}
        return {**positions, "returned": [*self._in_flight, *self._requeued], "fingerprint": self._fingerprint}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. Raises `ConfigError` if it was saved over other prompts or in another order."""
        require_same(state["fingerprint"], self._fingerprint, "data")
        positions = state["sets"] if "sets" in state else {ONLY: [state["epoch"], state["position"]]}
        for name, (epoch, position) in positions.items():
            self._sets[name].restore(int(epoch), int(position))
        self._requeued = deque(state["returned"])
        self._in_flight = {}


def require_same(saved: str, found: str, key: str, value: str = "") -> None:
    """Raise `ConfigError`, which names `key`, unless a fingerprint is that of the checkpoint."""
    if saved != found:
        same = "the same rows, weights, template, rollout.max_prompt_tokens, seed and data.shuffle"
        raise ConfigError(key, value, f"{same} as the resumed run", "it does not match the checkpoint")


def fingerprint(
    prompts: Sequence[Prompt], *, seed: int, shuffle: bool, weights: Mapping[str, float] | None = None
) -> str:
    """Hash everything that determines a stream of prompts, and their replies: the content of the rows.

    How they are rendered is not part of it, since a chat template may write today's date.
    """
    mixed = f" {sorted(weights.items())}" if weights else ""
    digest = hashlib.sha256(f"{seed} {shuffle} {len(prompts)}{mixed}".encode())
    for prompt in prompts:
        content = json.dumps([prompt.question, prompt.messages, prompt.template_kwargs], sort_keys=True)
        digest.update(f"\n{prompt.id} {prompt.answer} {content}".encode())
        if prompt.reply is not None:
            digest.update(json.dumps(prompt.reply, sort_keys=True).encode())
    return f"rows-{digest.hexdigest()[:16]}"
