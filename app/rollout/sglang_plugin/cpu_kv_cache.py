"""Which request each row of a decode step's padded keys and values holds; no SGLang here, so that it can be tested.

Always holds: a row is used only if it holds exactly the tokens before this one of exactly this request. A prefill of a
request (also of one that was retracted, or whose slot another one took) makes its row stale, and a stale row is read
from SGLang's pool again. Rows are dense: where a request has left, one of the last rows moves in.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

HEAD_ROOM = 64  # tokens by which requests may grow before the copy is made anew
SPARE = 4  # a copy of this many times the rows that are in use is made anew, too
FILLED = 0.75  # a bucket of a prefill takes requests of at least this fraction of its longest


@dataclass(slots=True)
class WorkingCopy:
    """Which request each row holds, and the rows themselves."""

    slots: list[int] = field(default_factory=list)  # SGLang's number of the request in each row
    lengths: list[int] = field(default_factory=list)  # tokens of it in the row; 0: stale
    rows: int = 0
    columns: int = 0
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # keys, values: [rows, heads, columns, D]

    def forget(self, slots: Sequence[int]) -> None:
        """What these rows hold is not what the pool holds any more."""
        gone = set(slots)
        self.lengths = [0 if slot in gone else length for slot, length in zip(self.slots, self.lengths, strict=True)]

    def clear(self) -> None:
        self.slots, self.lengths, self.rows, self.columns = [], [], 0, 0
        self.layers.clear()

    def follow(self, slots: Sequence[int], lengths: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
        """Take in a step whose requests have `lengths` tokens with the new one: the row of each, and the moves.

        Rows whose length in the copy is 0 are stale afterwards.
        """
        if len(slots) > self.rows or max(lengths) > self.columns or SPARE * len(slots) < self.rows:
            self.clear()
            self.rows, self.columns = len(slots), max(lengths) + HEAD_ROOM
        moves = self._keep(set(slots))
        held = {slot: row for row, slot in enumerate(self.slots)}
        rows = []
        for slot, length in zip(slots, lengths, strict=True):
            row = held.get(slot)
            if row is None:
                row = len(self.slots)
                self.slots.append(slot)
                self.lengths.append(0)
            elif self.lengths[row] != length - 1:
                self.lengths[row] = 0
            rows.append(row)
        return rows, moves

    def _keep(self, wanted: set[int]) -> list[tuple[int, int]]:
        """Drop the rows of other requests; the last rows move to where those were."""
        kept = sum(slot in wanted for slot in self.slots)
        free = [row for row in range(kept) if self.slots[row] not in wanted]
        moving = [row for row in range(kept, len(self.slots)) if self.slots[row] in wanted]
        for source, target in zip(moving, free, strict=True):
            self.slots[target], self.lengths[target] = self.slots[source], self.lengths[source]
        del self.slots[kept:], self.lengths[kept:]
        return list(zip(moving, free, strict=True))


def buckets(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of similar length together, the longest of each first.

    >>> buckets([10, 100, 9, 90])
    [[1, 3], [0, 2]]
    """
    found: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if found and lengths[index] >= FILLED * lengths[found[-1][0]]:
            found[-1].append(index)
        else:
            found.append([index])
    return found
