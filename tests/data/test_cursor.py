import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.data.cursor import PromptCursor
from app.types import Prompt
from tests.refusals import refused


def cursor(count: int, *, seed: int = 0, shuffle: bool = True, answer: str = "") -> PromptCursor:
    prompts = [
        Prompt(id=f"set/{row}", token_ids=np.array([row], dtype=np.int32), answer=answer or str(row), source="set")
        for row in range(count)
    ]
    return PromptCursor(prompts, seed=seed, shuffle=shuffle)


def ids(stream: PromptCursor, count: int) -> list[str]:
    return [prompt.id for prompt in stream.take(count)]


@given(count=st.integers(1, 40), seed=st.integers(0, 2**31 - 1), shuffle=st.booleans(), epochs=st.integers(1, 4))
def test_an_epoch_never_repeats_or_skips_a_prompt(count: int, seed: int, shuffle: bool, epochs: int) -> None:
    stream = cursor(count, seed=seed, shuffle=shuffle)
    for epoch in range(epochs):
        assert sorted(ids(stream, count)) == sorted(f"set/{row}@{epoch}" for row in range(count))


@given(
    count=st.integers(1, 20),
    before=st.integers(0, 60),
    requeued=st.sets(st.integers(0, 59)),
    unfinished=st.sets(st.integers(0, 59)),
    after=st.integers(1, 60),
)
def test_a_restored_cursor_continues_from_the_saved_position(
    count: int, before: int, requeued: set[int], unfinished: set[int], after: int
) -> None:
    saved = cursor(count, seed=7)
    dispatched = ids(saved, before)
    requeued_ids = [dispatched[index] for index in sorted(requeued) if index < before]
    saved.requeue(requeued_ids)
    in_flight = [dispatched[index] for index in sorted(unfinished - requeued) if index < before]
    saved.mark_consumed([each for each in dispatched if each not in {*requeued_ids, *in_flight}])
    state = json.loads(json.dumps(saved.state()))
    restored = cursor(count, seed=7)
    restored.take(3)  # a used cursor can be restored too
    restored.restore(state)
    assert ids(restored, len(in_flight)) == in_flight
    assert ids(restored, after) == ids(saved, after)


@given(count=st.integers(1, 12), steps=st.lists(st.tuples(st.integers(1, 10), st.sets(st.integers(0, 9))), max_size=12))
def test_requeuing_neither_loses_nor_duplicates_a_prompt(count: int, steps: list[tuple[int, set[int]]]) -> None:
    """For any sequence of take and requeue, each prompt of a past epoch is consumed exactly once."""
    stream = cursor(count, seed=1)
    finished = Counter[str]()
    for take, unfinished in steps:
        dispatched = ids(stream, take)
        requeued = [dispatched[index] for index in sorted(unfinished) if index < take]
        stream.requeue(requeued)
        stream.mark_consumed(sorted(set(dispatched) - set(requeued)))
        finished.update(set(dispatched) - set(requeued))

    while stream.state()["returned"]:
        requeued = ids(stream, 1)
        stream.mark_consumed(requeued)
        finished.update(requeued)

    assert all(times == 1 for times in finished.values())
    epoch, position = stream.state()["epoch"], stream.state()["position"]
    assert finished.total() == epoch * count + position
    for past in range(epoch):
        assert all(finished[f"set/{row}@{past}"] == 1 for row in range(count))


def test_requeued_prompts_come_first_in_the_given_order() -> None:
    stream = cursor(10)
    dispatched = ids(stream, 4)
    stream.requeue([dispatched[2], dispatched[0]])
    stream.requeue([dispatched[3]])
    assert ids(stream, 3) == [dispatched[3], dispatched[2], dispatched[0]]
    assert len(set(dispatched) | set(ids(stream, 6))) == 10


def test_the_order_depends_only_on_seed_and_epoch() -> None:
    assert ids(cursor(50, seed=1), 100) == ids(cursor(50, seed=1), 100)
    assert ids(cursor(50, seed=1), 50) != ids(cursor(50, seed=2), 50)
    both = ids(cursor(50), 100)
    assert [one.split("@")[0] for one in both[:50]] != [one.split("@")[0] for one in both[50:]]
    assert ids(cursor(6), 6) == [f"set/{row}@0" for row in (3, 5, 4, 0, 2, 1)]  # checkpoints outlive library versions


def test_the_state_is_small_and_does_not_grow_with_the_data() -> None:
    stream = cursor(5000)
    stream.mark_consumed(ids(stream, 7000))
    assert len(json.dumps(stream.state())) < 200


def test_ids_that_are_not_in_flight_are_rejected() -> None:
    stream = cursor(5)
    dispatched = ids(stream, 2)
    later = ids(cursor(5), 3)[2]
    for wrong in (later, "set/0@1", "set/9@0", "set/0", "other/0@0", ""):
        with pytest.raises(KeyError):
            stream.requeue([wrong])
        with pytest.raises(KeyError):
            stream.prompt(wrong)
    stream.requeue([dispatched[0]])
    for finish in (stream.requeue, stream.mark_consumed):
        with pytest.raises(KeyError, match="is not in flight"):
            finish([dispatched[0]])
    assert ids(stream, 1) == [dispatched[0]]
    stream.mark_consumed([dispatched[0]])
    with pytest.raises(KeyError, match="is not in flight"):
        stream.requeue([dispatched[0]])


def test_a_state_of_other_prompts_answers_seed_or_order_is_rejected() -> None:
    state = cursor(5, seed=1).state()
    others = [cursor(6, seed=1), cursor(5, seed=2), cursor(5, seed=1, shuffle=False), cursor(5, seed=1, answer="7")]
    for other in others:
        with refused("data", "", "seed", "data.shuffle"):
            other.restore(state)
