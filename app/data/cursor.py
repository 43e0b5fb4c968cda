"""Where training stands in its data: an endless, resumable stream of prompts.

Epoch by epoch, each in its own order, which follows from (seed, epoch) alone. So the whole state is a few numbers:
which epoch, how many of its prompts were handed out, and which of those are not settled.

    handed out → settled (trained on, or filtered: never again)
               → given back (handed out again before anything new)

Always holds: within an epoch every prompt is handed out exactly once, plus once more for each time it was given back;
a restored cursor first hands out what was out when its state was taken, then what had been given back, then goes on.
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
    """An endless iterator over prompts: ids are "<source>/<row>" going in, "<source>/<row>@<epoch>" coming out."""

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool) -> None:
        self._prompts = list(prompts)
        self._places = {prompt.id: place for place, prompt in enumerate(self._prompts)}
        if not self._prompts or len(self._places) != len(self._prompts):
            raise ValueError("a cursor needs prompts, each with an id of its own")
        self._seed, self._shuffle = seed, shuffle
        self._fingerprint = _fingerprint(self._prompts, seed, shuffle)
        self._out: dict[str, None] = {}  # ids that are neither settled nor given back, in the order of handing out
        self._returned: deque[str] = deque()  # ids to hand out again, first come first
        self._epoch, self._position = 0, 0  # `position` prompts of `epoch` were handed out
        self._order = self._order_of(0)

    def __len__(self) -> int:
        """Prompts in an epoch."""
        return len(self._prompts)

    def __next__(self) -> Prompt:
        prompt = self.prompt(self._returned.popleft()) if self._returned else self._fresh()
        self._out[prompt.id] = None
        return prompt

    def _fresh(self) -> Prompt:
        if self._position == len(self):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._order_of(self._epoch)
        chosen = self._prompts[self._order[self._position]]
        self._position += 1
        return replace(chosen, id=f"{chosen.id}@{self._epoch}")

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts."""
        return [next(self) for _ in range(count)]

    @property
    def epoch(self) -> float:
        """Epochs handed out so far, with the fraction of the current one."""
        return self._epoch + self._position / len(self)

    def prompt(self, prompt_id: str) -> Prompt:
        """The prompt of an id that this cursor handed out; `KeyError` for any other."""
        return replace(self._prompts[self._place(prompt_id)], id=prompt_id)

    def settle(self, prompt_ids: Sequence[str]) -> None:
        """These were trained on or filtered: they are done with. `KeyError` if one is not out."""
        self._remove(prompt_ids)

    def give_back(self, prompt_ids: Sequence[str]) -> None:
        """Put unfinished prompts at the head, in this order. `KeyError` if one is not out."""
        self._remove(prompt_ids)
        self._returned.extendleft(reversed(prompt_ids))

    def state(self) -> dict[str, Any]:
        """Where the stream stands, as JSON can hold it. What is out now a restored cursor hands out first."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "returned": [*self._out, *self._returned],
            "fingerprint": self._fingerprint,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken; a `ConfigError` if that was over other prompts or in another order."""
        if state["fingerprint"] != self._fingerprint:
            raise ConfigError(
                "data is not that of the checkpoint: give the same data set, template, rollout.max_prompt_tokens, "
                "seed and data.shuffle as the run that is resumed."
            )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._order_of(self._epoch)
        self._returned = deque(state["returned"])
        self._out = {}

    def _order_of(self, epoch: int) -> np.ndarray:
        """[prompts] int64: places in the order of this epoch."""
        if not self._shuffle:
            return np.arange(len(self))
        # the legacy generator's streams are frozen: a checkpoint survives a newer numpy
        return np.random.RandomState([self._seed, epoch]).permutation(len(self))

    def _place(self, prompt_id: str) -> int:
        """The place of an id; `KeyError` if it was never handed out."""
        base, _, epoch_text = prompt_id.rpartition("@")
        if base not in self._places or not epoch_text.isdecimal():
            raise KeyError(f"no prompt {prompt_id}")
        place, epoch = self._places[base], int(epoch_text)
        if epoch > self._epoch or (epoch == self._epoch and place in self._order[self._position :]):
            raise KeyError(f"prompt {prompt_id} was not handed out yet")
        return place

    def _remove(self, prompt_ids: Sequence[str]) -> None:
        for prompt_id in prompt_ids:
            if prompt_id not in self._out:
                raise KeyError(f"prompt {prompt_id} is not out")
            del self._out[prompt_id]


def _fingerprint(prompts: Sequence[Prompt], seed: int, shuffle: bool) -> str:
    """Changes with anything that would make a restored stream another one."""
    digest = hashlib.sha256(f"{seed} {shuffle} {len(prompts)}".encode())
    for prompt in prompts:
        digest.update(f"\n{prompt.id} {prompt.answer} ".encode())
        digest.update(prompt.token_ids.tobytes())
    return digest.hexdigest()[:16]
