"""Asyncio helpers."""

import asyncio
import os
import signal
import threading

import pytest

from app.errors import Interrupted
from app.utils.tasks import run_to_end, until_signal

DEADLINE_S = 60.0


async def test_a_second_signal_is_answered_and_only_a_third_ends_the_cleanup() -> None:
    events: list[str] = []
    second = asyncio.Event()

    async def work() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            await asyncio.sleep(DEADLINE_S)
        finally:
            events.append("cleanup began")
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.wait_for(second.wait(), DEADLINE_S)
            events.append("cleanup goes on")
            os.kill(os.getpid(), signal.SIGTERM)
            try:
                await asyncio.sleep(DEADLINE_S)
            except asyncio.CancelledError:
                events.append("cancelled again")
                raise

    def answer() -> None:
        events.append("answered")
        second.set()

    with pytest.raises(Interrupted, match="interrupted by SIGTERM"):
        await until_signal(work(), on_second=answer)
    assert events == ["cleanup began", "answered", "cleanup goes on", "cancelled again"]


async def test_a_cancellation_waits_for_the_thread() -> None:
    began, go = threading.Event(), threading.Event()
    ended: list[bool] = []

    def function() -> None:
        began.set()
        assert go.wait(DEADLINE_S)
        ended.append(True)

    task = asyncio.create_task(run_to_end(function))
    await asyncio.to_thread(began.wait, DEADLINE_S)
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=0.05)
    assert not done
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]
