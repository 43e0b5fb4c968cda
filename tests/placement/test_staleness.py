"""Admission and buffer over random schedules of everything that can happen to a group."""

import asyncio
from collections import Counter
from collections.abc import Coroutine
from typing import Any, TypeVar

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from app.placement.buffer import GroupBuffer
from app.placement.staleness import StalenessManager
from app.types import Completion, FinishReason, Group, Prompt, Trajectory, VersionSpan

T = TypeVar("T")
EMPTY = np.zeros(0, dtype=np.int32)


def group(number: int, version: int) -> Group:
    """A group with a token of this policy version."""
    prompt = Prompt(f"test/{number}@0", EMPTY, "", "test")
    completion = Completion(EMPTY, EMPTY.astype(np.float32), FinishReason.stop, (VersionSpan(version, 0, 1),))
    return Group(prompt, (Trajectory(prompt, completion, ""),))


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """The result of what does not have to wait."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waits")


class Schedules(RuleBasedStateMachine):
    """What a producer and a consumer may do, in any order; `ends` says how each dispatched group ended."""

    @initialize(
        prompts=st.integers(1, 4),
        staleness=st.integers(0, 3),
        in_flight=st.integers(1, 9),
        steps=st.integers(1, 6),
        done=st.integers(0, 5),
    )
    def begin(self, prompts: int, staleness: int, in_flight: int, steps: int, done: int) -> None:
        version = min(done, steps - 1)  # a run that goes on after its last checkpoint
        self.admission = StalenessManager.at(
            version, prompts_per_step=prompts, max_staleness=staleness, max_in_flight=in_flight, last_step=steps
        )
        self.buffer = GroupBuffer((staleness + 1) * prompts)
        self.prompts, self.staleness, self.steps = prompts, staleness, steps
        self.flying: dict[int, int] = {}  # number → version it was dispatched at
        self.fed: list[Group] = []
        self.dispatched, self.ends = 0, Counter[str]()
        self.counted = version * prompts  # groups of finished steps, missing ones included
        self.pushing = False

    @property
    def training(self) -> bool:
        return self.admission.version < self.steps and not self.pushing

    # --- the producer

    @precondition(lambda self: self.admission.capacity > 0)
    @rule(most=st.integers(1, 9))
    def dispatch(self, most: int) -> None:
        for _ in range(min(most, self.admission.capacity)):
            self.admission.dispatch()
            self.flying[self.dispatched] = self.admission.version
            self.dispatched += 1
        # nobody samples what no step needs
        assert self.admission.accepted + self.admission.in_flight <= self.steps * self.prompts

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), continued=st.booleans())
    def finish(self, data: st.DataObject, continued: bool) -> None:
        """The oldest token is of the version of the dispatch, or of a later one when the request had to wait."""
        number = data.draw(st.sampled_from(sorted(self.flying)))
        version = self.flying.pop(number)
        self.admission.accept()
        self.buffer.put(group(number, version if continued else self.admission.version))

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), how=st.sampled_from(["filtered", "aborted", "failed"]))
    def end_unused(self, data: st.DataObject, how: str) -> None:
        del self.flying[data.draw(st.sampled_from(sorted(self.flying)))]
        self.admission.release()
        self.ends[how] += 1

    # --- the consumer

    @precondition(lambda self: self.training and len(self.buffer) > 0 and len(self.fed) < self.prompts)
    @rule()
    def take(self) -> None:
        taken, stale = at_once(
            self.buffer.take(
                self.prompts - len(self.fed), is_fresh=lambda each: self.admission.is_fresh(each.oldest_version)
            )
        )
        self.admission.return_accepted(len(stale))
        self.ends["dropped"] += len(stale)
        self.fed += taken
        assert all(self.admission.version - each.oldest_version <= self.staleness for each in taken)
        assert all(self.admission.version - each.oldest_version > self.staleness for each in stale)

    @precondition(lambda self: self.training)
    @rule(short=st.booleans())
    def finish_step(self, short: bool) -> None:
        """Whole, or short where dynamic sampling has refilled enough; then the gate is shut for the push."""
        if len(self.fed) == self.prompts or (short and not len(self.buffer)):
            self.pushing, self.admission.dispatch_open = True, False
            assert self.admission.capacity == 0

    @precondition(lambda self: self.pushing)
    @rule()
    def pushed(self) -> None:
        self.admission.on_weights_synced(self.admission.version + 1, missing=self.prompts - len(self.fed))
        self.ends["trained"] += len(self.fed)
        self.counted += self.prompts
        self.fed, self.pushing, self.admission.dispatch_open = [], False, True

    # --- what always holds

    @invariant()
    def every_group_is_somewhere_once(self) -> None:
        waiting = len(self.buffer) + len(self.fed) + len(self.flying)
        assert self.dispatched == self.ends.total() + waiting
        assert self.admission.in_flight == len(self.flying)
        assert self.admission.accepted == self.counted + len(self.buffer) + len(self.fed)

    @invariant()
    def the_bounds_hold(self) -> None:
        assert len(self.buffer) <= self.buffer.capacity
        assert len(self.buffer) + len(self.flying) + len(self.fed) <= (self.staleness + 1) * self.prompts
        assert 0 <= self.admission.in_flight <= self.admission.max_in_flight

    @invariant()
    def nobody_waits_for_ever(self) -> None:
        if self.training and len(self.fed) < self.prompts and not len(self.buffer):
            assert self.admission.in_flight or self.admission.capacity

    @invariant()
    def a_finished_run_needs_nothing(self) -> None:
        if self.admission.version == self.steps:
            assert self.admission.capacity == 0

    @precondition(lambda self: self.admission.version == self.steps)
    @rule()
    def the_end(self) -> None:
        """Nothing more happens."""


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


def test_a_put_beyond_the_bound_is_a_bug_and_raises() -> None:
    buffer = GroupBuffer(2)
    buffer.put(group(0, 0))
    buffer.put(group(1, 0))
    with pytest.raises(OverflowError, match="already holds 2 groups"):
        buffer.put(group(2, 0))


async def test_take_waits_until_a_group_is_there_and_wake_lets_it_look_around() -> None:
    buffer = GroupBuffer(2)
    waiting = asyncio.create_task(buffer.take(2, is_fresh=lambda each: True))
    await asyncio.sleep(0)
    assert not waiting.done()
    buffer.wake()
    assert await waiting == ([], [])
    waiting = asyncio.create_task(buffer.take(2, is_fresh=lambda each: True))
    await asyncio.sleep(0)
    assert not waiting.done()
    buffer.put(group(0, 0))
    taken, _ = await waiting
    assert len(taken) == 1


def test_a_group_of_an_older_version_is_taken_before_newer_ones_that_arrived_first() -> None:
    buffer = GroupBuffer(6)
    for number, version in enumerate([3, 4, 2, 4, 3, 2]):
        buffer.put(group(number, version))
    taken, _ = at_once(buffer.take(6, is_fresh=lambda each: True))
    assert [each.prompt.id for each in taken] == [f"test/{number}@0" for number in (2, 5, 0, 4, 1, 3)]
