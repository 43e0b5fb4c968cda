"""Where training stands in its data: an endless, resumable stream of prompts.

Epoch by epoch, each in its own order, which follows from (seed, epoch) alone. So the whole state is a few numbers:
which epoch, how many of its prompts were handed out, and which of those were handed back unfinished.

Always holds: within an epoch every prompt is handed out exactly once, plus once more for each time it was given back;
prompts given back come first; a restored cursor continues exactly where the saved one stood.
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
        self._returned: deque[str] = deque()  # ids to hand out again, first come first
        self._epoch, self._position = 0, 0  # `position` prompts of `epoch` were handed out
        self._order = self._order_of(0)

    def __len__(self) -> int:
        """Prompts in an epoch."""
        return len(self._prompts)

    def __next__(self) -> Prompt:
        if self._returned:
            return self.prompt(self._returned.popleft())
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
        place, _ = self._locate(prompt_id)
        return replace(self._prompts[place], id=prompt_id)

    def give_back(self, prompt_ids: Sequence[str]) -> None:
        """Put unfinished prompts at the head, in this order. `KeyError` if one is not out."""
        self._refuse_unless_out(prompt_ids)
        self._returned.extendleft(reversed(prompt_ids))

    def state(self, unfinished: Sequence[str] = ()) -> dict[str, Any]:
        """Where the stream stands, as JSON can hold it.

        `unfinished` prompts are out but not trained on: a restored cursor hands them out first, this one goes on.
        """
        self._refuse_unless_out(unfinished)
        return {
            "epoch": self._epoch,
            "position": self._position,
            "returned": [*unfinished, *self._returned],
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

    def _order_of(self, epoch: int) -> np.ndarray:
        """[prompts] int64: places in the order of this epoch."""
        if not self._shuffle:
            return np.arange(len(self))
        # the legacy generator's streams are frozen: a checkpoint survives a newer numpy
        return np.random.RandomState([self._seed, epoch]).permutation(len(self))

    def _locate(self, prompt_id: str) -> tuple[int, int]:
        """(place, epoch) of an id; `KeyError` if it was never handed out."""
        base, _, epoch_text = prompt_id.rpartition("@")
        if base not in self._places or not epoch_text.isdecimal():
            raise KeyError(f"no prompt {prompt_id}")
        place, epoch = self._places[base], int(epoch_text)
        ahead = epoch == self._epoch and place in self._order[self._position :]
        if epoch > self._epoch or ahead:
            raise KeyError(f"prompt {prompt_id} was not handed out yet")
        return place, epoch

    def _refuse_unless_out(self, prompt_ids: Sequence[str]) -> None:
        waiting = set(self._returned)
        for prompt_id in prompt_ids:
            self._locate(prompt_id)
            if prompt_id in waiting:
                raise KeyError(f"prompt {prompt_id} was given back already")
            waiting.add(prompt_id)


def _fingerprint(prompts: Sequence[Prompt], seed: int, shuffle: bool) -> str:
    """Changes with anything that would make a restored stream another one."""
    digest = hashlib.sha256(f"{seed} {shuffle} {len(prompts)}".encode())
    for prompt in prompts:
        digest.update(f"\n{prompt.id} {prompt.answer} ".encode())
        digest.update(prompt.token_ids.tobytes())
    return digest.hexdigest()[:16]
