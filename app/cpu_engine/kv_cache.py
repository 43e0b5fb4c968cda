"""Runs inside SGLang's processes: which request each row of the padded KV cache holds, and attention over the rows.

Does not import SGLang, so that it can be tested in isolation.

Invariants:
    - A row is used only if it holds exactly the previous tokens of exactly this request.
    - A prefill makes the request's row stale, also when the request was retracted or its index was reused. Stale
      rows are read from SGLang's pool again.
    - Rows are dense: when a request leaves, one of the last rows moves into its row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from mmap import mmap

import torch
from torch import Tensor

HEAD_ROOM = 64  # tokens by which requests can grow before the rows are read again, at least
STRIDE = 32  # columns are an odd multiple of half of it: rows begin at cache lines, and not all in the same cache set
SPARE = 4  # rows with more than this many times the columns in use are read again, too


@dataclass(slots=True)
class WorkingCopy:
    """A padded copy of the keys and values of the requests in decode, carried from step to step.

    Each decode step calls `follow`, then fills the stale rows and sets `lengths` to the new lengths.
    """

    requests: list[int] = field(default_factory=list)  # by row: SGLang's index of the request
    lengths: list[int] = field(default_factory=list)  # by row: tokens of the request in the row; 0: stale
    columns: int = 0  # of each row
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # keys, values: flat, rows end to end

    def forget(self, requests: Sequence[int]) -> None:
        """Make the rows of these requests stale: the pool holds other tokens now."""
        for row, request in enumerate(self.requests):
            if request in requests:
                self.lengths[row] = 0

    def follow(self, requests: Sequence[int], lengths: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
        """Assign a row to each request of a decode step.

        Args:
            requests: SGLang's index of each request.
            lengths: Tokens of each request, with the new one.

        Returns:
            The row of each request, and the moves (from, to) to apply to the layers. Rows whose `lengths` are 0
            afterwards are stale.
        """
        longest = max(lengths)
        if longest > self.columns or self.columns > SPARE * (longest + HEAD_ROOM):
            wanted = longest + max(HEAD_ROOM, longest // 2)
            self.columns = -(-wanted // STRIDE) * STRIDE + STRIDE // 2
            self.requests = []
            self.lengths = []

        moves = self._compact(set(requests))
        row_of_request = {request: row for row, request in enumerate(self.requests)}
        rows = []
        for request, length in zip(requests, lengths, strict=True):
            row = row_of_request.get(request)
            if row is None:
                row = len(self.requests)
                self.requests.append(request)
                self.lengths.append(0)
            elif self.lengths[row] != length - 1:
                self.lengths[row] = 0
            rows.append(row)
        return rows, moves

    def layer(self, index: int, heads: int, key_width: int, value_width: int) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values, for all rows in use and more.

        Memory is kept, as touching fresh pages takes longer than filling them. Keys are transposed for the product
        with queries.

        Returns:
            Keys [rows, heads · key_width, columns] and values [rows, heads, columns, value_width], float32. Unwritten
            entries are finite, so that a masked token adds nothing.
        """
        rows = len(self.requests)
        keys, values = self.layers.get(index, (torch.zeros(0), torch.zeros(0)))
        keys = ensure_capacity(keys, rows * heads * key_width * self.columns)
        values = ensure_capacity(values, rows * heads * value_width * self.columns)
        self.layers[index] = keys, values
        return rows_of(keys, heads * key_width, self.columns), rows_of(values, heads, self.columns, value_width)

    def _compact(self, wanted: set[int]) -> list[tuple[int, int]]:
        """Drop the rows of other requests and move the last rows into the gaps. Returns the moves (from, to)."""
        count = sum(request in wanted for request in self.requests)
        gaps = [row for row in range(count) if self.requests[row] not in wanted]
        moving = [row for row in range(count, len(self.requests)) if self.requests[row] in wanted]
        moves = list(zip(moving, gaps, strict=True))

        for source, target in moves:
            self.requests[target] = self.requests[source]
            self.lengths[target] = self.lengths[source]
        del self.requests[count:], self.lengths[count:]
        return moves


def ensure_capacity(flat: Tensor, size: int) -> Tensor:
    """Return `flat`, or a larger tensor that begins with it if it has less than `size` numbers."""
    if flat.numel() >= size:
        return flat
    # A mapping of its own, zeroed: malloc would keep the memory in the process after the copy is dropped.
    count = max(size, flat.numel() * 3 // 2)
    larger = torch.frombuffer(mmap(-1, count * torch.float32.itemsize), dtype=torch.float32)
    larger[: flat.numel()] = flat
    return larger


def rows_of(flat: Tensor, *row: int) -> Tensor:
    """View a flat tensor as all the rows of shape `row` that fit."""
    rows = flat.numel() // prod(row)
    return flat[: rows * prod(row)].view(rows, *row)


def attend(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Attend from one token of each row.

    Two products take a fifth to a third less time than `scaled_dot_product_attention`. The query heads of a key head
    are rows of one product, so keys and values are not repeated.

    Args:
        q: [B, H·D].
        keys: [B or more, K·D, L or more] float32.
        values: [B or more, K, L or more, V] float32.
        bias: [B, 1, L] float32, added to the scores.

    Returns:
        [B, H·V] of q's dtype.
    """
    count, _, columns = bias.shape
    heads, width = values.shape[1], keys.shape[1] // values.shape[1]
    transposed = keys.view(-1, width, keys.shape[2])[: count * heads, :, :columns]
    scores = torch.bmm(q.reshape(count * heads, -1, width).to(keys.dtype), transposed)

    by_row = scores.view(count, -1, columns)
    torch.add(bias, by_row, alpha=scale, out=by_row)
    mixed = torch.bmm(scores.softmax(-1), values.flatten(0, 1)[: count * heads, :columns])
    return mixed.view(count, -1).to(q.dtype)
