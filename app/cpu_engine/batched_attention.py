"""Runs inside SGLang's processes: attention on CPU with one call per layer, not one per request as torch_native makes.

    pool           one row per token, of all requests in any order   SGLang's KV cache
    working copy   one row per request, padded                       read by one decode call

A decode step adds one token to each request, so the working copy is carried from step to step: each step writes its new
token into the pool and into the copy (kv_cache.py). Sliding windows, cross attention and encoders fall back to
torch_native.
"""

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from app.cpu_engine.kv_cache import WorkingCopy, attend
from app.model.packing import length_buckets

NAME = "torch_batched"
PAUSE = "sglang.srt.managers.scheduler.Scheduler.pause_generation"
MAX_PADDED = 2  # times the pool's tokens: a copy that padding makes larger is not allocated


def register() -> None:
    """Register the backend as `--attention-backend torch_batched`."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import add_attention_backend_choices

    add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(BatchedAttention)
    HookRegistry.register(PAUSE, drop_copy, HookType.AFTER)


def drop_copy(result: Any, scheduler: Any, request: Any, *_: Any) -> Any:
    """Drop the working copy when a pause retracted all requests: a trainer on these cores needs the memory.

    Runs as a hook after SGLang has paused. The next decode steps read the rows from the pool again.
    """
    backend = scheduler.tp_worker.model_runner.attn_backend
    if request.mode == "retract" and isinstance(backend, BatchedAttention):
        backend.drop_copy()
    return result


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
    request: Tensor | None  # [B] int64, of each row; None if the rows are in the order of the batch
    bias: Tensor  # [B, 1, L] float32, by row: 0 at a request's tokens, else -inf
    moves: list[tuple[int, int, int]]  # rows to move: from, to, tokens
    stale: list[tuple[int, Tensor]]  # rows to read from the pool, and the slots of their tokens


class BatchedAttention(TorchNativeAttnBackend):
    """SGLang's attention backend `torch_batched`."""

    def __init__(self, model_runner: Any):
        super().__init__(model_runner)
        self._copy = WorkingCopy()
        self._prefill: list[PrefillBucket] | None = None
        self._decode: DecodePlan | None = None

    def drop_copy(self) -> None:
        self._copy = WorkingCopy()
        self._decode = None

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
        if mode.is_decode() and plain and len(requests) * max(lengths) <= MAX_PADDED * self.token_to_kv_pool.size:
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
            save_kv_cache: False falls back to torch_native.

        Returns:
            [B, H·D].
        """
        plan = self._decode
        if plan is None or not save_kv_cache or not batchable(layer):
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)

        self._save(layer, forward_batch, k, v)
        keys, values = self._updated_rows(layer, plan)
        keys[plan.row, :, plan.last] = k.flatten(1).to(keys.dtype)
        values[plan.row, :, plan.last] = v.to(values.dtype)
        if plan.request is None:
            return attend(q, keys, values, plan.bias, layer.scaling)
        return attend(q[plan.request], keys, values, plan.bias, layer.scaling)[plan.row]

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> Tensor:
        """Attend as `forward_decode` does, from all T new tokens of a prefill, packed end to end."""
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
        moved = [(source, target, copy.lengths[target]) for source, target in moves]
        in_order = rows == list(range(len(rows)))

        row = torch.tensor(rows)
        length = torch.tensor(lengths)
        request = row.argsort()
        bias = torch.zeros(len(rows), max(lengths))
        bias.masked_fill_(torch.arange(max(lengths)) >= length[request, None], -torch.inf)

        stale = [
            (index, self.req_to_token_pool.req_to_token[pool_index, :tokens].long())
            for index, pool_index, tokens in zip(rows, requests, lengths, strict=True)
            if copy.lengths[index] == 0
        ]
        for index, tokens in zip(rows, lengths, strict=True):
            copy.lengths[index] = tokens
        return DecodePlan(row, length - 1, None if in_order else request, bias[:, None], moved, stale)

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
        pool_rows = torch.tensor([requests[index] for index in bucket], dtype=torch.int64)
        slots = self.req_to_token_pool.req_to_token[pool_rows, : len(key)].long()
        return PrefillBucket(
            tokens=starts[row] + column,
            row=row,
            column=column,
            slots=slots.masked_fill_(key >= length[:, None], 0),
            mask=(key <= query[:, :, None])[:, None],
        )

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

    def _updated_rows(self, layer: Any, plan: DecodePlan) -> tuple[Tensor, Tensor]:
        """Return this layer's working copy of keys and values after the plan's moves and reads."""
        keys, values = self._copy.layer(layer.layer_id, layer.tp_k_head_num, layer.qk_head_dim, layer.v_head_dim)
        for source, target, tokens in plan.moves:
            keys[target, :, :tokens] = keys[source, :, :tokens]
            values[target, :, :tokens] = values[source, :, :tokens]

        if plan.stale:
            pool_keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
            pool_values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
            for row, slots in plan.stale:
                keys[row, :, : len(slots)] = pool_keys.index_select(0, slots).flatten(1).T
                values[row, :, : len(slots)] = pool_values.index_select(0, slots).transpose(0, 1)
        return keys, values


def batchable(layer: Any) -> bool:
    """Return whether a layer is plain causal attention over all tokens."""
    window = layer.sliding_window_size is not None and layer.sliding_window_size >= 0
    return layer.attn_type is AttentionType.DECODER and not layer.is_cross_attention and not window
