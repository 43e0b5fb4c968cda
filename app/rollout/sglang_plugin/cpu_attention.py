"""Attention of an SGLang engine on a CPU: one call a layer for all requests, where torch_native makes one a request.

    pool           one row a token, of all requests in any order     what SGLang keeps
    working copy   [requests, heads, tokens, width], padded          what one decode call reads

A decode step adds one token to each request, so the copy is carried from step to step: each step writes its new token
into the pool and into the copy (working_copy.py). What this cannot do (sliding windows, cross attention, encoders) is
left to torch_native.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from app.rollout.sglang_plugin.cpu_kv_cache import WorkingCopy, buckets

NAME = "torch_batched"
LARGEST = 2  # times the pool's tokens: a copy that padding makes larger than this is not made


def register() -> None:
    """Make the backend known to SGLang, as `--attention-backend torch_batched`."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.server_args import add_attention_backend_choices

    add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(BatchedAttention)


@dataclass(frozen=True, slots=True)
class Bucket:
    """b requests of similar length in a prefill, computed together, at most Q new tokens and L tokens each."""

    tokens: Tensor  # [n] int64, where their new tokens stand in the packed batch
    row: Tensor  # [n] int64, in 0..b
    column: Tensor  # [n] int64, in 0..Q
    places: Tensor  # [b, L] int64, where their tokens are in the pool; 0 beyond a request's end
    mask: Tensor  # [b, 1, Q, L] bool, what each new token sees


@dataclass(frozen=True, slots=True)
class Decode:
    """One decode step of B requests over L columns of the working copy."""

    row: Tensor  # [B] int64, of each request
    last: Tensor  # [B] int64, column of each request's new token
    bias: Tensor  # [B, 1, 1, L] float32, by row: 0 at a request's tokens, else -inf
    moves: tuple[Tensor, Tensor]  # rows that move: from, to
    stale: Tensor  # [S] int64, rows to be read from the pool
    places: Tensor  # [S, L] int64, where their tokens are in the pool


class BatchedAttention(TorchNativeAttnBackend):
    """SGLang's attention backend `torch_batched`."""

    def __init__(self, model_runner: Any):
        super().__init__(model_runner)
        self._copy = WorkingCopy()
        self._extend: list[Bucket] | None = None
        self._decode: Decode | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Once a forward, before its layers."""
        super().init_forward_metadata(forward_batch)
        self._extend = self._decode = None
        mode, plain = forward_batch.forward_mode, forward_batch.encoder_lens is None
        if len(forward_batch.seq_lens) == 0:
            return
        slots, lengths = forward_batch.req_pool_indices.tolist(), forward_batch.seq_lens.tolist()
        if mode.is_decode() and plain and len(slots) * max(lengths) <= LARGEST * self.token_to_kv_pool.size:
            self._decode = self._plan_decode(slots, lengths)
            return
        self._copy.forget(slots)
        if mode.is_extend() and plain:
            new = forward_batch.extend_seq_lens.tolist()
            self._extend = [self._plan_bucket(bucket, slots, lengths, new) for bucket in buckets(lengths)]

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> Tensor:
        """`q` [B, H·D], `k` and `v` [B, K, D] of the new tokens → [B, H·D]."""
        plan = self._decode
        if plan is None or not save_kv_cache or not batchable(layer):
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
        self._save(layer, forward_batch, k, v)
        keys, values = self._rows_of(layer, plan, q.dtype)
        count, columns = len(plan.row), plan.bias.shape[-1]
        keys[plan.row, :, plan.last] = k.to(keys.dtype)
        values[plan.row, :, plan.last] = v.to(values.dtype)
        kept = layer.tp_k_head_num
        by_row = q.new_empty(count, kept, layer.tp_q_head_num // kept, layer.qk_head_dim)
        by_row[plan.row] = q.view(by_row.shape)  # the query heads of a key head stand where other queries would
        mixed = scaled_dot_product_attention(
            by_row,
            keys[:count, :, :columns],
            values[:count, :, :columns],
            attn_mask=plan.bias.to(q.dtype),
            scale=layer.scaling,
        )
        return mixed[plan.row].reshape(count, -1)

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> Tensor:
        """`q` [T, H·D], `k` and `v` [T, K, D] of all requests' new tokens, end to end → [T, H·D]."""
        if self._extend is None or not save_kv_cache or not batchable(layer):
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        self._save(layer, forward_batch, k, v)
        query = q.view(len(q), layer.tp_q_head_num, layer.qk_head_dim)
        out = q.new_zeros(len(q), layer.tp_q_head_num, layer.v_head_dim)
        for bucket in self._extend:
            padded = query.new_zeros(len(bucket.places), bucket.mask.shape[2], *query.shape[1:])
            padded[bucket.row, bucket.column] = query[bucket.tokens]
            keys, values = self._from_pool(layer, bucket.places, q.dtype)
            mixed = scaled_dot_product_attention(
                padded.transpose(1, 2),
                keys,
                values,
                attn_mask=bucket.mask,
                scale=layer.scaling,
                enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
            )
            out[bucket.tokens] = mixed.transpose(1, 2)[bucket.row, bucket.column]
        return out.view(len(q), -1)

    # --- inside

    def _plan_decode(self, slots: list[int], lengths: list[int]) -> Decode:
        copy = self._copy
        rows, moves = copy.follow(slots, lengths)
        row, length = torch.tensor(rows), torch.tensor(lengths)
        by_row = torch.empty_like(length)
        by_row[row] = length
        columns = torch.arange(max(lengths))
        bias = torch.zeros(len(slots), len(columns)).masked_fill_(columns >= by_row[:, None], -torch.inf)
        stale = [row for row, held in enumerate(copy.lengths) if held == 0]
        places = self._places([copy.slots[row] for row in stale], by_row[stale], len(columns))
        for at, now in zip(rows, lengths, strict=True):
            copy.lengths[at] = now
        sources, targets = torch.tensor(moves, dtype=torch.int64).view(-1, 2).unbind(1)
        return Decode(row, length - 1, bias[:, None, None], (sources, targets), torch.tensor(stale), places)

    def _plan_bucket(self, bucket: list[int], slots: list[int], lengths: list[int], new: list[int]) -> Bucket:
        starts = torch.tensor([0, *new]).cumsum(0)[bucket]
        length, added = torch.tensor(lengths)[bucket], torch.tensor(new)[bucket]
        row = torch.repeat_interleave(torch.arange(len(bucket)), added)
        column = torch.arange(len(row)) - torch.repeat_interleave(added.cumsum(0) - added, added)
        key = torch.arange(int(length.max()))
        query = (length - added)[:, None] + torch.arange(int(added.max()))  # place of each new token in its request
        return Bucket(
            tokens=starts[row] + column,
            row=row,
            column=column,
            places=self._places([slots[index] for index in bucket], length, len(key)),
            mask=(key <= query[:, :, None])[:, None],
        )

    def _places(self, slots: Sequence[int], lengths: Tensor, columns: int) -> Tensor:
        """[len(slots), columns]: where the tokens of these requests are in the pool, 0 beyond their ends."""
        places = self.req_to_token_pool.req_to_token[torch.tensor(slots, dtype=torch.int64), :columns].long()
        return places.masked_fill_(torch.arange(columns) >= lengths[:, None], 0)

    def _save(self, layer: Any, forward_batch: Any, k: Tensor, v: Tensor) -> None:
        places = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
        self.token_to_kv_pool.set_kv_buffer(layer, places, k, v)

    def _from_pool(self, layer: Any, places: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values at `places` [b, L], each [b, K, L, D]."""
        pool = self.token_to_kv_pool
        buffers = (pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id))
        read = (buffer.index_select(0, places.flatten()).unflatten(0, places.shape) for buffer in buffers)
        keys, values = (part.transpose(1, 2).to(dtype) for part in read)
        return keys, values

    def _rows_of(self, layer: Any, plan: Decode, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """This layer's rows of the working copy, brought up to what the plan says."""
        copy = self._copy
        if layer.layer_id not in copy.layers:
            shape = (copy.rows, layer.tp_k_head_num, copy.columns)
            copy.layers[layer.layer_id] = (
                torch.zeros(*shape, layer.qk_head_dim, dtype=dtype),
                torch.zeros(*shape, layer.v_head_dim, dtype=dtype),
            )
        both = copy.layers[layer.layer_id]
        sources, targets = plan.moves
        fresh = self._from_pool(layer, plan.places, dtype) if len(plan.stale) else ()
        for held in both:
            if len(sources):
                held[targets] = held[sources]
        for held, read in zip(both, fresh, strict=False):
            held[plan.stale, :, : read.shape[2]] = read
        return both


def batchable(layer: Any) -> bool:
    """Whether a layer is plain causal attention over all tokens."""
    window = layer.sliding_window_size is not None and layer.sliding_window_size >= 0
    return layer.attn_type is AttentionType.DECODER and not layer.is_cross_attention and not window
