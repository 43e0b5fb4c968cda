"""The order of new prompts: shuffled epochs of each training set, and the mixture of several sets by weight.

The next prompt comes from the set that is furthest behind its share of the prompts dispatched so far, so that each step
has the same proportions and the state of the mixture is that of its sets:

    weights 2 : 1  →  a b a a b a a b a …

Invariants:
- The order depends only on prompts, weights, seed and `shuffle`.
- Each set is dispatched in whole epochs of its own: a small set with a large weight is repeated, none is cut short.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from app.types import Prompt


class Epochs(Iterator[Prompt]):
    """Endless epochs over one set of prompts, which appends the epoch to their ids.

    Attributes:
        epoch: The current epoch, from 0.
        position: Prompts of this epoch dispatched so far.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool) -> None:
        self._prompts = list(prompts)
        self._rows = {prompt.id: row for row, prompt in enumerate(self._prompts)}
        self._seed = seed
        self._shuffle = shuffle
        self.restore(0, 0)

    def __len__(self) -> int:
        """Prompts per epoch."""
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
        self.position = position
        self._order = self._order_of(epoch)

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

    def _order_of(self, epoch: int) -> np.ndarray:
        """Rows in the order of this epoch: [prompts] int64."""
        if not self._shuffle:
            return np.arange(len(self))
        # The streams of the legacy generator are frozen, so checkpoints survive a newer numpy.
        return np.random.RandomState([self._seed, epoch]).permutation(len(self))


class Mixture(Iterator[Prompt]):
    """New prompts of all training sets.

    Args:
        prompts: All prompts. With `weights`, the source of each names its set.
        seed: Seed of the order within each set.
        shuffle: Shuffle in every epoch.
        weights: By set; None or empty makes all prompts one set.
    """

    def __init__(
        self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool, weights: Mapping[str, float] | None
    ) -> None:
        members: dict[str, list[Prompt]] = {name: [] for name in weights or ()}
        for prompt in prompts:
            members.setdefault(prompt.source if weights else "", []).append(prompt)

        self._sets = {name: Epochs(each, seed=seed, shuffle=shuffle) for name, each in members.items()}
        total = sum((weights or {"": 1.0}).values())
        self._shares = {name: weight / total for name, weight in (weights or {"": 1.0}).items()}

    def __next__(self) -> Prompt:
        total = sum(each.dispatched for each in self._sets.values()) + 1
        behind = {name: self._shares[name] * total - each.dispatched for name, each in self._sets.items()}
        return next(self._sets[max(behind, key=behind.__getitem__)])

    def prompt(self, prompt_id: str) -> Prompt:
        """Look up a dispatched prompt by id. Raises `KeyError` for any other id."""
        source = prompt_id.partition("/")[0] if "" not in self._sets else ""
        if source not in self._sets:
            raise KeyError(f"no prompt {prompt_id}")
        return self._sets[source].prompt(prompt_id)

    def state(self) -> dict[str, Any]:
        """Return epoch and position of the only set, or of each set by name, as JSON-serializable values."""
        if "" in self._sets:
            only = self._sets[""]
            return {"epoch": only.epoch, "position": only.position}
        return {"sets": {name: [each.epoch, each.position] for name, each in self._sets.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state of the same sets."""
        positions = state["sets"] if "sets" in state else {"": [state["epoch"], state["position"]]}
        for name, (epoch, position) in positions.items():
            self._sets[name].restore(int(epoch), int(position))
