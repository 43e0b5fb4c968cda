"""The producer: owns every group from its dispatch until it is trained on or discarded.

    cursor → admission → engines → reward workers → filter → buffer → take (staleness check) → consumer
               ↑ capacity is freed: filtered, aborted, dropped, synced

Invariants:
    - Every dispatched group ends exactly once: trained on, filtered, aborted or dropped.
    - The prompt of an aborted or dropped group is requeued at the head of the cursor: no prompt is lost, and prompts
      with long completions are not underrepresented. It is dispatched right after a sync, which gives it the longest
      time before the next abort: `max_staleness + 1` steps.
    - Back-pressure acts at admission only.
"""

import asyncio
import itertools
from collections.abc import Coroutine, Iterable
from functools import partial
from typing import Any

from app.algorithm.filter import RolloutCounts
from app.placement.buffer import GroupBuffer
from app.placement.context import RunContext
from app.placement.staleness import StalenessManager
from app.rollout.requests import Aborted, sampling_of
from app.types import Group, Prompt
from app.utils.tasks import task_group

WARN_ABORTS = 3  # of one prompt


class Producer:
    """Dispatches prompts while admission allows, and hands out fresh groups.

    Lifecycle of a step: `take` …, `pause_dispatch`, `abort_stale`, `on_weights_synced`, `resume_dispatch`.
    """

    def __init__(self, context: RunContext, version: int):
        config = context.config
        self.context = context
        self.wanted = config.algorithm.prompts_per_step
        # filtered and unplayable groups of a step; the first round is no refill
        self.max_rejected = (1 + config.algorithm.max_refill_rounds) * self.wanted
        self.staleness = StalenessManager.at(
            version,
            prompts_per_step=self.wanted,
            max_staleness=config.placement.max_staleness,
            max_in_flight=context.concurrency.groups,
            last_step=config.steps,
        )
        self.buffer = GroupBuffer((config.placement.max_staleness + 1) * self.wanted)
        self.counts = RolloutCounts()
        self.running: dict[str, int | None] = {}  # prompt id → version when it was sent last; None before
        self._changed = asyncio.Event()
        self._numbers = itertools.count()
        self._dispatch_number: dict[str, int] = {}  # of the prompts in flight or in the buffer
        self._aborts: dict[str, int] = {}  # prompt id → times aborted since it was last sampled to the end
        self._warned = False

    async def run(self) -> None:
        """Dispatch until cancelled. Raises the first failure of a group."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                # environments that fail at once would use up all prompts while the trainer is busy
                while self.staleness.capacity > 0 and len(self.counts.unplayable) < self.max_rejected:
                    self._dispatch(tasks)
                self._changed.clear()
                await self._changed.wait()

    async def run_beside(self, consumer: Coroutine[Any, Any, None]) -> None:
        """Dispatch until the consumer returns. The first failure ends both."""
        async with task_group() as tasks:
            producer = tasks.create_task(self.run(), name="producer")
            await tasks.create_task(consumer, name="consumer")
            producer.cancel()

    # --- for the consumer

    async def take(self, limit: int) -> list[Group]:
        """Wait for groups and remove up to `limit` that are fresh enough to be trained on now.

        Stale groups are dropped and counted; their prompts are sampled again. May return no groups; call again.
        """
        fresh, stale = await self.buffer.take(
            limit, is_fresh=lambda group: self.staleness.is_fresh(group.oldest_version)
        )
        if stale:
            self.counts.dropped += len(stale)
            self.counts.discarded_tokens += sum(group.completion_tokens for group in stale)
            self.staleness.return_accepted(len(stale))
            self._discard(stale)
            self.context.cursor.requeue([group.prompt.id for group in stale])
            self._changed.set()
        return fresh

    def dispatch_number(self, group: Group) -> int:
        return self._dispatch_number[group.prompt.id]

    def refill_exhausted(self) -> bool:
        """Whether the step used up its refill rounds, so that it trains on what it has."""
        rejected = len(self.counts.filtered) + len(self.counts.unplayable)
        return not len(self.buffer) and rejected >= self.max_rejected

    def pause_dispatch(self) -> None:
        self.staleness.dispatch_open = False

    def resume_dispatch(self) -> None:
        self.staleness.max_in_flight = self.context.concurrency.groups
        self.staleness.dispatch_open = True
        self._changed.set()

    async def abort_stale(self, version: int) -> None:
        """Abort the requests that would be too stale once `version` is synced."""
        limit = version - self.staleness.max_staleness
        stale = [prompt_id for prompt_id, sent_at in self.running.items() if sent_at is not None and sent_at < limit]
        if stale:
            await self.context.rollouter.abort(stale)

    def on_weights_synced(self, version: int, trained: Iterable[Group]) -> None:
        """Record that `version` was synced and that these groups were trained on."""
        groups = list(trained)
        self.staleness.on_weights_synced(version, missing=self.wanted - len(groups))
        self._discard(groups)

    def drain_counts(self) -> RolloutCounts:
        """Return the counts since the last call, and start again at zero."""
        counts, self.counts = self.counts, RolloutCounts()
        counts.failed = self.context.rollouter.pop_lost()
        return counts

    def describe(self) -> str:
        return (
            f"{len(self.buffer)} groups in the buffer, capacity for {self.staleness.capacity} more, "
            f"dispatch {'open' if self.staleness.dispatch_open else 'paused'}"
        )

    # --- one group

    def _dispatch(self, tasks: asyncio.TaskGroup) -> None:
        prompt = next(self.context.cursor)
        number = next(self._numbers)
        self.staleness.dispatch()
        self.running[prompt.id] = None
        self._dispatch_number[prompt.id] = number

        task = tasks.create_task(self._sample(prompt), name=f"group {prompt.id}")
        # A callback also runs for a task that is cancelled before its first instruction.
        task.add_done_callback(partial(self._on_task_done, prompt, number))

    async def _sample(self, prompt: Prompt) -> None:
        size = self.context.config.algorithm.group_size
        try:
            group = await self.context.rollouter.group(
                prompt,
                size=size,
                sampling=sampling_of(self.context.config.rollout),
                version=lambda: self.staleness.version,
                on_sent=lambda: self.running.update({prompt.id: self.staleness.version}),  # also when sent again
            )
        except Aborted as error:
            self.counts.aborted += 1
            self.counts.discarded_tokens += error.tokens
            self._release(prompt)
            self.context.cursor.requeue([prompt.id])
            self._count_abort(prompt, error.tokens)
        else:
            self._aborts.pop(prompt.id, None)
            if self.counts.keep(group, self.context.config.algorithm):
                del self.running[prompt.id]
                self.staleness.accept()
                self.buffer.put(group)
            else:
                self._release(prompt)
                self.buffer.wake()  # the consumer may have to stop waiting for refills
        finally:
            self._changed.set()

    def _count_abort(self, prompt: Prompt, tokens: int) -> None:
        """Warn, once, about a prompt that is sampled and aborted over and over."""
        aborts = self._aborts.get(prompt.id, 0) + 1
        self._aborts[prompt.id] = aborts
        if aborts < WARN_ABORTS or self._warned:
            return

        self._warned = True
        bound = self.staleness.max_staleness + 1
        if self.context.config.environment.multi_turn:
            what, smaller, drain = "episodes take", "environment.max_turns", ""
        else:
            what, smaller = f"completions ({tokens} tokens so far) take", "rollout.max_completion_tokens"
            drain = " placement.in_flight=drain aborts none, but every sync waits for the longest completion."
        self.context.recorder.warn(
            f"prompt {prompt.id} was aborted {aborts} times: its {what} more than {bound} weight syncs "
            f"(placement.max_staleness + 1) and begin again each time. Raise placement.max_staleness to at least "
            f"{bound}, or try a smaller {smaller} or rollout.max_inflight_groups.{drain}"
        )

    def _release(self, prompt: Prompt) -> None:
        del self.running[prompt.id]
        del self._dispatch_number[prompt.id]
        self.staleness.release()

    def _discard(self, groups: Iterable[Group]) -> None:
        """Delete the records of groups that left the buffer for good."""
        for group in groups:
            del self._dispatch_number[group.prompt.id]

    def _on_task_done(self, prompt: Prompt, number: int, _: asyncio.Task[None]) -> None:
        """Release a group that failed or was cancelled. Its prompt may be in flight again by now."""
        if prompt.id in self.running and self._dispatch_number[prompt.id] == number:
            self._release(prompt)
