import asyncio
import socket

import pytest

from app.worker.wire import Close, Codec, LineProtocol, WireError


async def test_messages_to_an_end_that_is_gone_are_dropped_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    ended: list[WireError | None] = []

    end, other = socket.socketpair()
    lines = LineProtocol(Codec(), lambda message: None, ended.append)
    await asyncio.get_running_loop().create_connection(lambda: lines, sock=end)
    other.close()
    for episode in range(10):  # before the loop learns that the other end is gone
        lines.send(Close(episode))
    assert ended == []
    await asyncio.sleep(0)
    assert ended == [None]
    assert caplog.messages == []
