"""The rows of batched attention hold the current tokens of their request, never others."""

import random

import psutil
import torch

from app.cpu_engine.kv_cache import WorkingCopy


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


def test_rows_that_are_too_short_or_much_too_long_are_read_again() -> None:
    copy = WorkingCopy()
    step(copy, {1: 5, 2: 5})
    short = copy.columns
    assert step(copy, {1: 6, 2: short + 1})[2] == {0, 1}
    assert short < copy.columns < 2 * short + 64
    assert step(copy, {1: 4000})[2] == {0}
    assert step(copy, {1: 7})[2] == {0}
    assert copy.columns == short


def test_a_layer_that_gets_more_rows_keeps_what_it_holds() -> None:
    copy = WorkingCopy()
    step(copy, {7: 5, 3: 9})
    for tensor in copy.layer(0, heads=2, key_width=3, value_width=4):
        tensor.normal_()
    held = copy.layer(0, heads=2, key_width=3, value_width=4)
    assert [tensor.shape for tensor in held] == [(2, 6, copy.columns), (2, 2, copy.columns, 4)]

    assert step(copy, {7: 6, 3: 10, 4: 1, 5: 1})[2] == {2, 3}
    for larger, before in zip(copy.layer(0, heads=2, key_width=3, value_width=4), held, strict=True):
        assert len(larger) == 4
        assert torch.equal(larger[:2], before)
        assert not larger[2:].any()


def test_a_dropped_copy_gives_its_memory_back_to_the_system() -> None:
    copy = WorkingCopy()
    step(copy, {request: 1000 for request in range(64)})
    held = copy.layer(0, heads=8, key_width=32, value_width=32)
    for tensor in held:
        tensor.fill_(1.0)
    nbytes, process = sum(tensor.nbytes for tensor in held), psutil.Process()
    before = process.memory_info().rss

    del tensor, held, copy
    assert before - process.memory_info().rss > 0.9 * nbytes > 100e6


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
