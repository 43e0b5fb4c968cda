"""Runs inside SGLang's processes: reports the unfinished requests of a scheduler with its internal state.

SGLang's own health checks are satisfied by any output of the scheduler, so they cannot see that one request was lost
while others are sampled. The engine's host compares this report with its requests in flight (app/rollout/progress.py).
"""

from collections.abc import Iterator
from typing import Any

REPORT = "posttrain_requests"  # its key among the internal states of `/server_info`
INTERNAL_STATE = "sglang.srt.managers.scheduler.Scheduler.get_internal_state"


def add_report(reply: Any, scheduler: Any, *_: Any) -> Any:
    """Add the report to one reply. Hook after `get_internal_state`."""
    reply.internal_state[REPORT] = unfinished(scheduler)
    return reply


def unfinished(scheduler: Any) -> dict[str, int | None]:
    """Return the sampled tokens of each unfinished request by id; None while it waits to be scheduled."""
    report: dict[str, int | None] = {request.rid: None for request in scheduler.waiting_queue}
    report |= {request.rid: len(request.output_ids) for request in _scheduled(scheduler) if not request.finished()}
    return report


def _scheduled(scheduler: Any) -> Iterator[Any]:
    batches = [scheduler.running_batch, scheduler.last_batch]
    # With pipeline parallelism.
    batches += [*getattr(scheduler, "running_mbs", ()), *getattr(scheduler, "mbs", ())]
    for batch in batches:
        if batch is not None:
            yield from batch.reqs

    if scheduler.chunked_req is not None:
        yield scheduler.chunked_req
