"""Runs inside SGLang's processes on a CPU: the prompt of a group is computed once, not once for each member.

The members arrive together, and SGLang adds all of them to one prefill, where none has the others' prompt in the prefix
cache. Here the first one is added, and the others wait for the next batch, which finds its prompt there. With 8
members and completions of 32 tokens the prefill took half of a generation (SmolLM2-135M, prompts of 46 tokens).

Invariant: a request waits for one batch at most, in which another request with its prompt is computed.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

ADD_REQUEST = "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req"
MIN_TOKENS = 16  # of a prompt that are not in the cache: below, another batch costs more

_waited: WeakSet[Any] = WeakSet()


def add_one_req(original: Callable[..., Any], adder: Any, req: Any, *rest: Any, **named: Any) -> Any:
    """Add a request to the prefill, or leave it in the queue if this prefill computes its prompt for another one."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    if waits(adder, req):
        _waited.add(req)
        return AddReqResult.CONTINUE
    return original(adder, req, *rest, **named)


def waits(adder: Any, req: Any) -> bool:
    """Return whether a request has to wait."""
    return (
        req not in _waited
        and not getattr(adder.tree_cache, "disable", True)
        and adder.rem_mamba_slots is None  # those of recurrent layers are reserved before a request is added
        and len(req.origin_input_ids) - getattr(req, "prefix_len", 0) >= MIN_TOKENS
        and any(each.origin_input_ids == req.origin_input_ids for each in adder.can_run_list)
    )
