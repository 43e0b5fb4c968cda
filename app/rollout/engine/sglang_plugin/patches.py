"""Runs inside SGLang's processes: hooks that correct or speed up SGLang, each independent of the others."""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# --- on every device: what an engine computed from its weights and keeps

LOADED = "sglang.srt.model_loader.loader.DefaultModelLoader.postprocess_weights"
TRANSPOSED = "_conv_weights_t"  # beside `conv_weights`, a view of the parameter


# SGLang 0.5.22 and 0.5.23 transpose the convolutions of linear attention on NPUs at their first use, keep the copies
# (`_get_conv_weights_t` in hardware_backend/npu/attention), and never refresh them: after a weight sync such an engine
# would compute with its initial convolutions. Every way to load weights, of a sync or of a checkpoint, ends with the
# method hooked here, in every rank and for a draft model too. CONTRIBUTING.md lists the other copies.
@torch.inference_mode()  # in which SGLang may have made the copies: nothing else may change them
def refresh_convolutions(_: None, model: Any, *__: Any) -> None:
    """Compute the copies again, in place: captured graphs read their memory. Hook after weights were loaded."""
    for module in model.modules():
        copy = getattr(module, TRANSPOSED, None)
        if copy is not None:
            copy.copy_(module.conv_weights.transpose(0, 1))


# --- on every device: no batch computes while weights change

BEGUN = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.begin_weight_update"


# SGLang 0.5.23 returns from a pause in place at once, while a batch may still run on a stream of its own: it would go
# on with a mixture of old and new weights.
def finish_batch(updater: Any, *_: Any) -> None:
    """Wait for the device. Hook before the first weight of a sync is loaded."""
    device = torch.device(updater.device)
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


# --- on every device: what rows that pad a decode graph's batch read

RESUMED = (
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.resume_memory_occupation"
)


# SGLang 0.5.23 fills its table of KV slots with zeros once. Rows that pad a batch to a captured size read row 0 of it;
# memory that comes back after a release may hold anything, also slots outside of the cache.
@torch.inference_mode()
def clear_padding(reply: Any, updater: Any, *_: Any) -> Any:
    """Let padded rows read slot 0 again. Hook after memory came back."""
    if "kv_cache" not in updater.offload_tags:
        updater.scheduler.req_to_token_pool.req_to_token[0] = 0
    return reply


# --- on a CPU: sampling from a large vocabulary with one random number a request

SAMPLE = "sglang.srt.layers.sampler.sampling_from_probs_torch"
BLOCK = 64  # tokens


# torch's multinomial draws a number for each token of the vocabulary, 3 million in a step of 64 requests with a
# vocabulary of 49,152: a fifth of the step. Here the probabilities are summed once, in blocks; a random number selects
# a block by their cumulative sum, and a token in it. With top_k, top_p, min_p or a seed SGLang's own sampling runs.
def sample(
    original: Callable[..., Tensor], probs: Tensor, sampling_seed: Tensor | None = None, positions: Any = None
) -> Tensor:
    """Return a token of each row of probs [B, V], [B] int32."""
    if sampling_seed is not None or probs.dtype != torch.float32 or not probs.shape[1]:
        return original(probs, sampling_seed, positions)
    tokens = select(probs, torch.rand(len(probs), 1, dtype=torch.float64))
    return original(probs, sampling_seed, positions) if tokens is None else tokens.int()


def select(probs: Tensor, uniform: Tensor) -> Tensor | None:
    """Return the first token of each row at which the cumulative probability exceeds a share of the row's sum.

    Args:
        probs: [B, V] float32; a row need not sum to 1.
        uniform: [B, 1] float64, the shares, in [0, 1).

    Returns:
        [B] int64; a token of probability 0 is never among them. None if a row has no finite, positive sum.
    """
    if excess := -probs.shape[1] % BLOCK:
        probs = torch.nn.functional.pad(probs, (0, excess))
    blocks = probs.unflatten(1, (-1, BLOCK))
    cumulative = blocks.sum(-1).double().cumsum(-1)
    total = cumulative[:, -1:]
    if not (total.isfinite() & (total > 0)).all():
        return None

    share = uniform * total
    block = _first_above(cumulative, share)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp_(min=0)), 0)
    within = blocks[torch.arange(len(probs)), block[:, 0]].double().cumsum(-1)
    return (block * BLOCK + _first_above(within, share - before))[:, 0]


def _first_above(cumulative: Tensor, share: Tensor) -> Tensor:
    """Return the first index at which `cumulative` exceeds `share`, or, by rounding, the last at which it grows."""
    below = torch.nextafter(cumulative[:, -1:], torch.zeros_like(share))
    return torch.searchsorted(cumulative, torch.minimum(share, below), right=True)


# --- on every device: the prompt of a group is computed once, not once for each member

ADD_REQUEST = "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req"
MIN_TOKENS = 16  # of a prompt that are not in the cache: below, another batch costs more

_adders: deque[Any] = deque(maxlen=2)  # of the prefill that is being planned, and of the one before


# The members arrive together, and SGLang adds all of them to one prefill, where none has the others' prompt in the
# prefix cache. Here the first one is added, and the others wait until its prompt is there: for the next batch, or with
# the overlap scheduler, which plans that one before it has processed this one, for the batch after it. On a CPU the
# prefill took half of a generation (SmolLM2-135M, groups of 8, 46 prompt tokens, 32 new ones). SGLang's parallel
# sampling does the same, but 0.5.23 gives each sample a random request id: it cannot be aborted by ours, nor watched.
def add_one_req(original: Callable[..., Any], adder: Any, req: Any, *rest: Any, **named: Any) -> Any:
    """Add a request to the prefill, or leave it in the queue while its prompt is computed for another one."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    return AddReqResult.CONTINUE if waits(adder, req) else original(adder, req, *rest, **named)


def waits(adder: Any, req: Any) -> bool:
    """Return whether a request has to wait: every rank of a server must decide the same."""
    if not _adders or _adders[-1] is not adder:
        _adders.append(adder)
    return (
        not getattr(adder.tree_cache, "disable", True)
        # A recurrent state is reserved before a request is added, and stays with one that is not.
        and not adder.tree_cache.supports_mamba()
        and not adder.preempt_list  # a running request would have made room for one that waits
        and len(req.origin_input_ids) - getattr(req, "prefix_len", 0) >= MIN_TOKENS
        and any(
            each.origin_input_ids == req.origin_input_ids
            for every in _adders
            for each in every.can_run_list
            if each is not req and not each.output_ids
        )
    )
