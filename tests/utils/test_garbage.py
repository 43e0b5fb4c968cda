"""Collections of a run do not look at what was alive when it began, and still free what it leaves."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import suppress

import pytest

from app.utils.garbage import long_lived_objects_frozen, no_collections


@pytest.fixture(autouse=True)
def nothing_frozen() -> Iterator[None]:
    """The test session froze its own modules."""
    gc.unfreeze()
    yield
    gc.enable()
    gc.collect()
    gc.freeze()


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_objects_from_before_are_frozen_in_the_block_and_no_longer_after_it() -> None:
    kept = Cycle()
    with long_lived_objects_frozen():
        assert gc.get_freeze_count() > 1000
        assert all(each is not kept for each in gc.get_objects())
    assert gc.get_freeze_count() == 0
    assert any(each is kept for each in gc.get_objects())


def test_what_others_froze_stays_frozen() -> None:
    gc.freeze()
    with long_lived_objects_frozen():
        pass
    assert gc.get_freeze_count() > 1000


def test_garbage_of_the_block_is_freed_in_it_and_that_from_before_after_it() -> None:
    gc.disable()
    old = weakref.ref(Cycle())
    with long_lived_objects_frozen():
        new = weakref.ref(Cycle())
        gc.collect()
        assert new() is None
        assert old() is not None
    gc.collect()
    assert old() is None


def test_garbage_of_frozen_objects_is_freed_after_the_block() -> None:
    cycle = Cycle()
    reference = weakref.ref(cycle)
    with long_lived_objects_frozen():
        del cycle
        gc.collect()
        assert reference() is not None
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("before", [True, False])
def test_collections_are_off_in_the_block_and_afterwards_as_before(before: bool) -> None:
    (gc.enable if before else gc.disable)()
    with suppress(ImportError), no_collections():
        assert not gc.isenabled()
        import no_such_module  # noqa: F401
    assert gc.isenabled() is before
