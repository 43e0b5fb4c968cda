"""The producing half of fully_async: admits prompts while staleness allows, and puts finished groups into the buffer.

    cursor → admission → engines → reward workers → filter → buffer
               ↑ capacity comes back: filtered, aborted, dropped, pushed

What always holds: every dispatched group ends exactly once; a prompt whose group was aborted goes back to the cursor's
head, so that no prompt is lost and long ones are not at a disadvantage. Back-pressure is at admission and nowhere else.
"""

import asyncio
import itertools
from collections.abc import Iterable
from functools import partial

from app.algorithm.advantage import has_reward_variance
from app.placement.buffer import GroupBuffer
from app.placement.context import RunContext
from app.placement.staleness import StalenessManager
from app.placement.step_metrics import RolloutCounts
from app.protocols import RolloutEngine
from app.rollout.rollouter import Aborted
from app.types import Group, Prompt, ScoredGroup


class Producer:
    def __init__(self, parts: RunContext, admission: StalenessManager, buffer: GroupBuffer, tally: RolloutCounts):
        self.parts, self.admission, self.buffer, self.tally = parts, admission, buffer, tally
        self.running: dict[str, int] = {}  # prompt id → version it was dispatched at
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

        self._numbers = itertools.count()
        self._order: dict[str, int] = {}  # prompt id → number of its dispatch; of groups in flight or in the buffer

    async def run(self) -> None:
        """Dispatch for ever; ends by being cancelled, or with the first failure of a group."""
        async with asyncio.TaskGroup() as groups:
            while True:
                while self.admission.capacity > 0:
                    prompt = next(self.parts.cursor)
                    self.admission.dispatch()
                    self.running[prompt.id] = self.admission.version
                    number = self._order[prompt.id] = next(self._numbers)
                    task = groups.create_task(self._group(prompt), name=f"group {prompt.id}")
                    # also for a task that is cancelled before its first instruction
                    task.add_done_callback(partial(self._over, prompt, number))
                self._changed.clear()
                await self._changed.wait()

    def look_again(self) -> None:
        """Capacity may have changed."""
        self._changed.set()

    def in_order(self, scored: Iterable[ScoredGroup]) -> list[ScoredGroup]:
        """In the order of dispatch: arrival is short completions first, which would sort them into the same update."""
        return sorted(scored, key=lambda each: self._order[each.group.prompt.id])

    def forget(self, groups: Iterable[Group]) -> None:
        """These left the buffer for good: trained on, or dropped."""
        for group in groups:
            del self._order[group.prompt.id]

    async def abort_stale(self, version: int) -> None:
        """End the requests that could not be used any more once `version` is pushed."""
        limit = version - self.admission.max_staleness
        stale = [prompt_id for prompt_id, begun in self.running.items() if begun < limit]
        if stale:
            await self.parts.pool.each(RolloutEngine.abort, stale)

    async def _group(self, prompt: Prompt) -> None:
        algorithm = self.parts.config.algorithm
        try:
            group = await self.parts.rollouter.group(
                prompt, size=algorithm.group_size, sampling=self.parts.sampling, version=self.admission.version
            )
        except Aborted:
            self.tally.aborted += 1
            self._ended(prompt)
            self.parts.cursor.give_back([prompt.id])
        else:
            self._finished(prompt, group)
        finally:
            self.look_again()

    def _finished(self, prompt: Prompt, group: Group) -> None:
        if self.parts.config.algorithm.dynamic_sampling and not has_reward_variance(group):
            self.tally.filtered.append(group)
            self._ended(prompt)
            self.buffer.wake()  # the consumer may want to stop waiting for refills
        else:
            del self.running[prompt.id]
            self.admission.accept()
            self.buffer.put(group)

    def _ended(self, prompt: Prompt) -> None:
        del self.running[prompt.id], self._order[prompt.id]
        self.admission.release()

    def _over(self, prompt: Prompt, number: int, _: asyncio.Task[None]) -> None:
        """Failed or cancelled, if it has not ended otherwise; its prompt may be in flight again by now."""
        if prompt.id in self.running and self._order[prompt.id] == number:
            self._ended(prompt)
