"""Detects prompts in flight that make no progress, from a server's reports.

A report gives the sampled tokens of each unfinished request (engine/sglang_plugin/entry_points.py). A prompt
makes progress when

    - a request of it sampled tokens, was scheduled, or finished: its part of the report changed; or
    - the server made progress while requests are queued, and the server knows at least one request of the prompt:
      queued requests wait for a place, and prefills of queued requests come before the decoding of others.

A prompt whose requests the server has lost is therefore detected while others still run. A server that runs
without our plugin reports nothing: then any output of its scheduler is progress of all prompts.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

from app.errors import EngineError, EngineLost
from app.rollout.engine.client import Client, KeyRefused, Report

POLL_INTERVAL_S = 5.0
NAMED_PROMPTS = 5  # at most, in messages
InFlightRequests = Mapping[str, Sequence[str]]  # request ids by prompt id


class ProgressClock:
    """The time since each prompt in flight made progress. Times are seconds of any monotonic clock.

    >>> clock = ProgressClock()
    >>> clock.observe({"a": ["a#0"], "b": ["b#0"]}, {"a#0": 3, "b#0": 1}, now=0.0)
    >>> clock.observe({"a": ["a#0"], "b": ["b#0"]}, {"a#0": 9}, now=5.0)
    >>> clock.observe({"a": ["a#0"], "b": ["b#0"]}, {"a#0": 14}, now=10.0)
    >>> clock.stalled(now=10.0, limit_s=4.0), clock.lost("b")
    (['b'], True)
    """

    def __init__(self) -> None:
        self.beats = 0  # signs of progress of a server without reports
        self._report: Report = {}
        self._parts: dict[str, tuple[object, ...]] = {}  # prompt id → its part of the last report
        self._changed_at: dict[str, float] = {}  # prompt id → time of its last progress
        self._tokens: dict[str, int] = {}  # request id → most tokens that were reported

    def reset(self, prompts: InFlightRequests, now: float) -> None:
        """Start all clocks again: the server is paused, or showed progress in another way."""
        self._changed_at = dict.fromkeys(prompts, now)

    def observe(self, prompts: InFlightRequests, report: Report | None, now: float) -> None:
        """Take note of a report about these prompts. None: the server did not reply."""
        changed_at = {prompt: self._changed_at.get(prompt, now) for prompt in prompts}
        if report is not None:
            queueing = report != self._report and None in report.values()
            for prompt, request_ids in prompts.items():
                part = tuple(report.get(request_id, "unknown") for request_id in request_ids)
                known = any(request_id in report for request_id in request_ids)
                if part != self._parts.get(prompt) or (known and queueing):
                    changed_at[prompt] = now
                self._parts[prompt] = part
            self._report = report
            self._tokens = {
                request_id: max(self._tokens.get(request_id, 0), report.get(request_id) or 0)
                for request_ids in prompts.values()
                for request_id in request_ids
            }

        self._changed_at = changed_at
        self._parts = {prompt: part for prompt, part in self._parts.items() if prompt in prompts}

    def stalled(self, now: float, limit_s: float) -> list[str]:
        """Return the observed prompts that made no progress for longer than `limit_s` seconds."""
        return [prompt for prompt, changed_at in self._changed_at.items() if now - changed_at > limit_s]

    def lost(self, prompt: str) -> bool:
        """Return whether the last report had no request of this prompt."""
        return set(self._parts.get(prompt, ())) == {"unknown"}

    def tokens(self, request_ids: Sequence[str]) -> int:
        """Return the tokens that these requests had sampled at the last report."""
        return sum(self._tokens.get(request_id, 0) for request_id in request_ids)


async def stall(
    client: Client, clock: ProgressClock, sampling: Callable[[], InFlightRequests], limit_s: float
) -> EngineError:
    """Poll a server until a prompt makes no progress for `limit_s`; return the error that names it.

    `sampling` returns the prompts that the server should be sampling; empty while it is paused.
    """
    seconds = max(2.0, limit_s / 2)
    while True:
        await asyncio.sleep(min(POLL_INTERVAL_S, limit_s / 4))
        before = sampling()
        if not before:
            clock.reset(before, time.monotonic())
            continue

        try:
            report = await client.unfinished(seconds)
            replied = report is not None or await client.healthy("/health_generate", seconds)
        except KeyRefused as error:
            # Another server listens at this address now.
            return error
        except EngineError:
            replied, report = False, None

        # The report says nothing about prompts that ended, or were paused, since it was requested.
        prompts = {prompt: ids for prompt, ids in sampling().items() if prompt in before}
        if replied and report is None:
            clock.beats += 1
            clock.reset(prompts, time.monotonic())
        else:
            clock.observe(prompts, report, time.monotonic())

        if stalled := clock.stalled(time.monotonic(), limit_s):
            lost = [prompt for prompt in stalled if clock.lost(prompt)]
            limit = f"rollout.stall_timeout_s={limit_s:.0f} s"
            named = ", ".join((lost or stalled)[:NAMED_PROMPTS])
            what = f"made no progress for {limit} with {len(stalled)} prompts in flight"
            if lost:
                what = f"lost all requests of {len(lost)} prompts: its scheduler did not know them for {limit}"
            return EngineLost(f"{client.name} {what} ({named})")
