"""Which of several failures to tell."""

import asyncio

from app.errors import RunError


def first_failure(failures: BaseExceptionGroup) -> BaseException:
    """The failure that ended the others: our own sentences before anything else, cancellations last."""
    flat: list[BaseException] = []
    waiting: list[BaseException] = [failures]
    while waiting:
        error = waiting.pop(0)
        if isinstance(error, BaseExceptionGroup):
            waiting += error.exceptions
        else:
            flat.append(error)
    return min(flat, key=lambda error: (not isinstance(error, RunError), isinstance(error, asyncio.CancelledError)))
