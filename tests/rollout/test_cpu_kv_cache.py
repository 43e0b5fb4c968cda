"""The rows of batched attention hold the current tokens of their request, never others."""

import random

import torch

from app.rollout.sglang_plugin.cpu.kv_cache import HEAD_ROOM, WorkingCopy


def step(copy: WorkingCopy, requests: dict[int, int]) -> tuple[list[int], list[tuple[int, int]], set[int]]:
    """A decode step of request → tokens with the new one: rows, moves, stale rows."""
    rows, moves = copy.follow(list(requests), list(requests.values()))
    stale = {row for row, length in enumerate(copy.lengths) if length == 0}
    for row, length in zip(rows, requests.values(), strict=True):
        copy.lengths[row] = length
    return rows, moves, stale


def test_requests_that_go_on_keep_their_rows() -> None:
    copy = WorkingCopy()
    assert step(copy, {7: 5, 3: 9}) == ([0, 1], [], {0, 1})
    assert step(copy, {7: 6, 3: 10}) == ([0, 1], [], set())
    assert step(copy, {3: 11, 7: 7}) == ([1, 0], [], set())


def test_the_last_row_moves_to_where_a_request_has_left() -> None:
    copy = WorkingCopy()
    step(copy, {1: 5, 2: 5, 3: 5})
    assert step(copy, {2: 6, 3: 6}) == ([1, 0], [(2, 0)], set())


def test_a_request_that_was_prefilled_again_is_stale_at_the_same_length_too() -> None:
    copy = WorkingCopy()
    step(copy, {1: 5, 2: 5})
    copy.forget([2])
    assert step(copy, {1: 6, 2: 6}) == ([0, 1], [], {1})


def test_a_request_that_missed_a_step_is_stale() -> None:
    copy = WorkingCopy()
    step(copy, {1: 5, 2: 5})
    assert step(copy, {1: 6, 2: 7}) == ([0, 1], [], {1})


def test_a_copy_that_is_much_too_large_is_dropped() -> None:
    copy = WorkingCopy()
    step(copy, {request: 5 for request in range(8)})
    copy.layer(0, heads=1, key_width=2, value_width=2)
    step(copy, {0: 6, 1: 6})
    assert (copy.rows, len(copy.layers)) == (8, 1)
    assert step(copy, {0: 7})[2] == {0}
    assert (copy.rows, copy.layers) == (1, {})


def test_a_copy_that_grows_keeps_what_it_holds() -> None:
    copy = WorkingCopy()
    step(copy, {7: 5, 3: 9})
    keys, values = copy.layer(0, heads=2, key_width=3, value_width=4)
    keys.normal_(), values.normal_()
    assert step(copy, {7: 6, 3: 300, 4: 1})[2] == {1, 2}  # 3 missed steps, 4 is new
    grown_keys, grown_values = copy.layer(0, heads=2, key_width=3, value_width=4)
    assert grown_keys.shape == (3, 6, copy.columns)
    assert grown_values.shape == (3, 2, copy.columns, 4)
    assert torch.equal(grown_keys[:2, :, : keys.shape[2]], keys)
    assert torch.equal(grown_values[:2, :, : values.shape[2]], values)
    assert not grown_keys[2].any()
    assert not grown_values[2].any()


def test_rows_begin_at_cache_lines_in_different_cache_sets() -> None:
    for length in (1, 17, 300, 4000):
        copy = WorkingCopy()
        step(copy, {1: length})
        assert copy.columns > length + HEAD_ROOM - 1
        assert copy.columns % 32 == 16


def test_rows_hold_what_they_should_through_thousands_of_random_steps() -> None:
    """Each row is simulated as the list of the tokens of its request."""
    choose, copy = random.Random(0), WorkingCopy()
    alive: dict[int, list[int]] = {}  # request → its tokens
    rows: dict[int, list[int]] = {}  # row → tokens that the copy's layers would hold
    for token in range(3000):
        for ended in [request for request in alive if choose.random() < 0.1]:
            del alive[ended]
        for request in set(range(12)) - set(alive):
            if choose.random() < 0.1:
                alive[request] = [-token] * choose.randrange(1, 60)
                copy.forget([request])
        if not alive:
            continue
        for tokens in alive.values():
            tokens.append(token)
        taken, moves, stale = step(copy, {request: len(tokens) for request, tokens in alive.items()})
        for source, target in moves:
            rows[target] = list(rows[source])
        for row, tokens in zip(taken, alive.values(), strict=True):
            rows[row] = list(tokens) if row in stale else [*rows[row], token]
            assert rows[row] == tokens
        assert sorted(taken) == list(range(len(alive)))
        assert max(len(tokens) for tokens in alive.values()) <= copy.columns
