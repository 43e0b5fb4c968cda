"""Runs inside SGLang's processes: attention on CPU with one call per layer, not one per request as torch_native makes.

    pool           one row per token, of all requests in any order   SGLang's KV cache
    working copy   [requests, heads, tokens, width], padded          read by one decode call

A decode step adds one token to each request, so the working copy is carried from step to step: each step writes its new
token into the pool and into the copy (cpu_kv_cache.py). Sliding windows, cross attention and encoders fall back to
torch_native.
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

from app.rollout.sglang_plugin.cpu_kv_cache import WorkingCopy
from app.utils.lengths import length_buckets

NAME = "torch_batched"
LARGEST = 2  # times the pool's tokens: a copy that padding makes larger is not allocated


def register() -> None:
    """Register the backend as `--attention-backend torch_batched`."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.server_args import add_attention_backend_choices

    add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(BatchedAttention)


@dataclass(frozen=True, slots=True)
class PrefillBucket:
    """b requests of similar length in a prefill, with at most Q new tokens and L tokens each, n new tokens in all."""

    tokens: Tensor  # [n] int64, index of each new token in the packed batch
    row: Tensor  # [n] int64, in 0..b
    column: Tensor  # [n] int64, in 0..Q
    slots: Tensor  # [b, L] int64, pool slot of each token; 0 after a request's end
    mask: Tensor  # [b, 1, Q, L] bool, the tokens that each new token attends to


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """One decode step of B requests over L columns of the working copy."""

    row: Tensor  # [B] int64, of each request
    last: Tensor  # [B] int64, column of each request's new token
    bias: Tensor  # [B, 1, 1, L] float32, by row: 0 at a request's tokens, else -inf
    moves: tuple[Tensor, Tensor]  # rows to move: from, to
    stale: Tensor  # [S] int64, rows to read from the pool
    slots: Tensor  # [S, L] int64, pool slots of their tokens


class BatchedAttention(TorchNativeAttnBackend):
    """SGLang's attention backend `torch_batched`."""

    def __init__(self, model_runner: Any):
        super().__init__(model_runner)
        self._copy = WorkingCopy()
        self._prefill: list[PrefillBucket] | None = None
        self._decode: DecodePlan | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan a forward pass, before its layers run."""
        super().init_forward_metadata(forward_batch)
        self._prefill = None
        self._decode = None
        if len(forward_batch.seq_lens) == 0:
            return

        mode = forward_batch.forward_mode
        plain = forward_batch.encoder_lens is None
        requests = forward_batch.req_pool_indices.tolist()
        lengths = forward_batch.seq_lens.tolist()
        if mode.is_decode() and plain and len(requests) * max(lengths) <= LARGEST * self.token_to_kv_pool.size:
            self._decode = self._plan_decode(requests, lengths)
            return

        self._copy.forget(requests)
        if mode.is_extend() and plain:
            added = forward_batch.extend_seq_lens.tolist()
            self._prefill = [self._plan_bucket(bucket, requests, lengths, added) for bucket in length_buckets(lengths)]

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> Tensor:
        """Attend from one new token per request.

        Args:
            q: [B, H·D].
            k: [B, K, D].
            v: [B, K, D].
            layer: SGLang's attention layer.
            forward_batch: SGLang's batch.
            save_kv_cache: False falls back to torch_native.

        Returns:
            [B, H·D].
        """
        plan = self._decode
        if plan is None or not save_kv_cache or not batchable(layer):
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)

        self._save(layer, forward_batch, k, v)
        keys, values = self._updated_rows(layer, plan, q.dtype)
        count = len(plan.row)
        columns = plan.bias.shape[-1]
        keys[plan.row, :, plan.last] = k.to(keys.dtype)
        values[plan.row, :, plan.last] = v.to(values.dtype)

        # The query heads of a key head take the query-length axis, so keys and values are not repeated.
        key_heads = layer.tp_k_head_num
        by_row = q.new_empty(count, key_heads, layer.tp_q_head_num // key_heads, layer.qk_head_dim)
        by_row[plan.row] = q.view(by_row.shape)
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
        """Attend from all new tokens of a prefill, packed end to end.

        Args:
            q: [T, H·D].
            k: [T, K, D].
            v: [T, K, D].
            layer: SGLang's attention layer.
            forward_batch: SGLang's batch.
            save_kv_cache: False falls back to torch_native.

        Returns:
            [T, H·D].
        """
        if self._prefill is None or not save_kv_cache or not batchable(layer):
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)

        self._save(layer, forward_batch, k, v)
        query = q.view(len(q), layer.tp_q_head_num, layer.qk_head_dim)
        out = q.new_zeros(len(q), layer.tp_q_head_num, layer.v_head_dim)
        for bucket in self._prefill:
            padded = query.new_zeros(len(bucket.slots), bucket.mask.shape[2], *query.shape[1:])
            padded[bucket.row, bucket.column] = query[bucket.tokens]
            keys, values = self._from_pool(layer, bucket.slots, q.dtype)
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

    # --- plans

    def _plan_decode(self, requests: list[int], lengths: list[int]) -> DecodePlan:
        copy = self._copy
        rows, moves = copy.follow(requests, lengths)
        row = torch.tensor(rows)
        length = torch.tensor(lengths)
        by_row = torch.empty_like(length)
        by_row[row] = length

        columns = torch.arange(max(lengths))
        bias = torch.zeros(len(requests), len(columns)).masked_fill_(columns >= by_row[:, None], -torch.inf)
        stale = [row for row, copied in enumerate(copy.lengths) if copied == 0]
        slots = self._pool_slots([copy.requests[row] for row in stale], by_row[stale], len(columns))

        for index, tokens in zip(rows, lengths, strict=True):
            copy.lengths[index] = tokens
        sources, targets = torch.tensor(moves, dtype=torch.int64).view(-1, 2).unbind(1)
        return DecodePlan(row, length - 1, bias[:, None, None], (sources, targets), torch.tensor(stale), slots)

    def _plan_bucket(
        self, bucket: list[int], requests: list[int], lengths: list[int], added_tokens: list[int]
    ) -> PrefillBucket:
        starts = torch.tensor([0, *added_tokens]).cumsum(0)[bucket]
        length = torch.tensor(lengths)[bucket]
        added = torch.tensor(added_tokens)[bucket]

        row = torch.repeat_interleave(torch.arange(len(bucket)), added)
        column = torch.arange(len(row)) - torch.repeat_interleave(added.cumsum(0) - added, added)
        key = torch.arange(int(length.max()))
        query = (length - added)[:, None] + torch.arange(int(added.max()))  # position of each new token in its request
        return PrefillBucket(
            tokens=starts[row] + column,
            row=row,
            column=column,
            slots=self._pool_slots([requests[index] for index in bucket], length, len(key)),
            mask=(key <= query[:, :, None])[:, None],
        )

    def _pool_slots(self, requests: Sequence[int], lengths: Tensor, columns: int) -> Tensor:
        """Return the pool slots of the requests' tokens, [len(requests), columns], 0 after their ends."""
        slots = self.req_to_token_pool.req_to_token[torch.tensor(requests, dtype=torch.int64), :columns].long()
        return slots.masked_fill_(torch.arange(columns) >= lengths[:, None], 0)

    # --- pool and working copy

    def _save(self, layer: Any, forward_batch: Any, k: Tensor, v: Tensor) -> None:
        location = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
        self.token_to_kv_pool.set_kv_buffer(layer, location, k, v)

    def _from_pool(self, layer: Any, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the keys and values at `slots` [b, L], each [b, K, L, D]."""

        def read(buffer: Tensor) -> Tensor:
            return buffer.index_select(0, slots.flatten()).unflatten(0, slots.shape).transpose(1, 2).to(dtype)

        pool = self.token_to_kv_pool
        return read(pool.get_key_buffer(layer.layer_id)), read(pool.get_value_buffer(layer.layer_id))

    def _updated_rows(self, layer: Any, plan: DecodePlan, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return this layer's keys and values in the working copy, after the plan's moves and reads."""
        copy = self._copy
        if layer.layer_id not in copy.layers:
            shape = (copy.rows, layer.tp_k_head_num, copy.columns)
            copy.layers[layer.layer_id] = (
                torch.zeros(*shape, layer.qk_head_dim, dtype=dtype),
                torch.zeros(*shape, layer.v_head_dim, dtype=dtype),
            )
        keys, values = copy.layers[layer.layer_id]

        sources, targets = plan.moves
        if len(sources):
            keys[targets] = keys[sources]
            values[targets] = values[sources]

        if len(plan.stale):
            columns = plan.slots.shape[1]
            fresh_keys, fresh_values = self._from_pool(layer, plan.slots, dtype)
            keys[plan.stale, :, :columns] = fresh_keys
            values[plan.stale, :, :columns] = fresh_values
        return keys, values


def batchable(layer: Any) -> bool:
    """Return whether a layer is plain causal attention over all tokens."""
    window = layer.sliding_window_size is not None and layer.sliding_window_size >= 0
    return layer.attn_type is AttentionType.DECODER and not layer.is_cross_attention and not window
