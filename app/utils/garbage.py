"""Garbage collection where the heap is mostly modules and prompts, which live as long as the process."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def long_lived_objects_frozen() -> Iterator[None]:
    """Leave what is there now out of the collections in the block: each would look at all of it again.

    Garbage from before stays too: looking for it among all modules would delay the start of a run. Whoever may have
    left more than imports do collects first.

    If the heap was already frozen on entry, nothing is unfrozen on exit.
    """
    mine = gc.get_freeze_count() == 0
    gc.freeze()
    try:
        yield
    finally:
        if mine:
            gc.unfreeze()


@contextmanager
def no_collections() -> Iterator[None]:
    """Collect nothing in the block, which imports modules: they leave little garbage, and looking for it takes long."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
