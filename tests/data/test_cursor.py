import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.data.cursor import PromptCursor
from app.errors import ConfigError
from app.types import Prompt


def cursor(count: int, *, seed: int = 0, shuffle: bool = True) -> PromptCursor:
    prompts = [
        Prompt(id=f"set/{row}", token_ids=np.array([row], dtype=np.int32), answer=str(row), source="set")
        for row in range(count)
    ]
    return PromptCursor(prompts, seed=seed, shuffle=shuffle)


def ids(stream: PromptCursor, count: int) -> list[str]:
    return [prompt.id for prompt in stream.take(count)]


@given(count=st.integers(1, 40), seed=st.integers(0, 2**31 - 1), shuffle=st.booleans(), epochs=st.integers(1, 4))
@settings(deadline=None)
def test_an_epoch_never_repeats_or_skips_a_prompt(count, seed, shuffle, epochs):
    stream = cursor(count, seed=seed, shuffle=shuffle)
    for epoch in range(epochs):
        assert sorted(ids(stream, count)) == sorted(f"set/{row}@{epoch}" for row in range(count))


@given(
    count=st.integers(1, 20),
    before=st.integers(0, 60),
    returned=st.sets(st.integers(0, 59)),
    unfinished=st.sets(st.integers(0, 59)),
    after=st.integers(1, 60),
)
@settings(deadline=None)
def test_a_restored_cursor_continues_where_the_saved_one_stood(count, before, returned, unfinished, after):
    saved = cursor(count, seed=7)
    out = ids(saved, before)
    back = [out[place] for place in sorted(returned) if place < before]
    saved.give_back(back)
    open_ids = [out[place] for place in sorted(unfinished - returned) if place < before]
    saved.settle([each for each in out if each not in {*back, *open_ids}])
    state = json.loads(json.dumps(saved.state()))
    restored = cursor(count, seed=7)
    restored.take(3)  # a used cursor can be restored too
    restored.restore(state)
    assert ids(restored, len(open_ids)) == open_ids
    assert ids(restored, after) == ids(saved, after)


@given(count=st.integers(1, 12), steps=st.lists(st.tuples(st.integers(1, 10), st.sets(st.integers(0, 9))), max_size=12))
@settings(deadline=None)
def test_giving_back_loses_no_prompt_and_doubles_none(count, steps):
    """Whatever is taken and given back, each prompt of a past epoch was finished exactly once."""
    stream, finished = cursor(count, seed=1), Counter[str]()
    for take, unfinished in steps:
        out = ids(stream, take)
        back = [out[place] for place in sorted(unfinished) if place < take]
        stream.give_back(back)
        stream.settle(sorted(set(out) - set(back)))
        finished.update(set(out) - set(back))
    while stream.state()["returned"]:
        again = ids(stream, 1)
        stream.settle(again)
        finished.update(again)
    assert all(times == 1 for times in finished.values())
    epoch, position = stream.state()["epoch"], stream.state()["position"]
    assert finished.total() == epoch * count + position
    for past in range(epoch):
        assert all(finished[f"set/{row}@{past}"] == 1 for row in range(count))


def test_prompts_given_back_come_first_in_the_order_given():
    stream = cursor(10)
    out = ids(stream, 4)
    stream.give_back([out[2], out[0]])
    stream.give_back([out[3]])
    assert ids(stream, 3) == [out[3], out[2], out[0]]
    assert len(set(out) | set(ids(stream, 6))) == 10


def test_the_order_follows_from_seed_and_epoch_alone():
    assert ids(cursor(50, seed=1), 100) == ids(cursor(50, seed=1), 100)
    assert ids(cursor(50, seed=1), 50) != ids(cursor(50, seed=2), 50)
    both = ids(cursor(50), 100)
    assert [one.split("@")[0] for one in both[:50]] != [one.split("@")[0] for one in both[50:]]
    assert ids(cursor(6), 6) == [f"set/{row}@0" for row in (3, 5, 4, 0, 2, 1)]  # checkpoints outlive library versions


def test_without_shuffling_rows_come_in_their_order():
    assert ids(cursor(3, shuffle=False), 4) == ["set/0@0", "set/1@0", "set/2@0", "set/0@1"]


def test_the_state_is_small_and_does_not_grow_with_the_data():
    stream = cursor(5000)
    stream.settle(ids(stream, 7000))
    assert len(json.dumps(stream.state())) < 200
    assert stream.epoch == pytest.approx(1.4)


def test_a_prompt_is_found_by_its_id():
    stream = cursor(5)
    chosen = stream.take(7)[6]
    found = stream.prompt(chosen.id)
    assert (found.id, found.answer, found.token_ids.tolist()) == (chosen.id, chosen.answer, chosen.token_ids.tolist())


def test_ids_that_are_not_out_are_refused():
    stream = cursor(5)
    out = ids(stream, 2)
    later = ids(cursor(5), 3)[2]
    for wrong in (later, "set/0@1", "set/9@0", "set/0", "other/0@0", ""):
        with pytest.raises(KeyError):
            stream.give_back([wrong])
        with pytest.raises(KeyError):
            stream.prompt(wrong)
    stream.give_back([out[0]])
    for done_with in (stream.give_back, stream.settle):
        with pytest.raises(KeyError, match="is not out"):
            done_with([out[0]])
    assert ids(stream, 1) == [out[0]]
    stream.settle([out[0]])
    with pytest.raises(KeyError, match="is not out"):
        stream.give_back([out[0]])


def test_a_state_of_other_prompts_seed_or_order_is_refused():
    state = cursor(5, seed=1).state()
    for other in (cursor(6, seed=1), cursor(5, seed=2), cursor(5, seed=1, shuffle=False)):
        with pytest.raises(ConfigError, match=r"^data is not that of the checkpoint: give the same data set"):
            other.restore(state)
