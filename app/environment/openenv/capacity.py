"""The number of sessions that an OpenEnv server holds, which only its refusal of one reports."""

import asyncio
import contextlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any

from app.environment.openenv.ws_session import CAPACITY, ws_url

ASK = json.dumps({"type": "state"})  # answered by a session, and needs no reset
ASK_S = 20.0  # for all sessions; then the number is not known


def most_sessions(url: str, needed: int) -> int | None:
    """Open as many sessions as a run needs, and close them.

    Args:
        url: Of the server, http://…
        needed: Sessions. Up to one opens none: the server has at least one.

    Returns:
        What the server holds, if it refused a session; None: it refused none, or did not answer in time.
    """
    if needed <= 1:
        return None
    with ThreadPoolExecutor(1) as thread:  # the caller's event loop runs
        return thread.submit(asyncio.run, _most_sessions(ws_url(url), needed)).result()


async def _most_sessions(url: str, needed: int) -> int | None:
    import aiohttp

    most: int | None = None
    try:
        async with asyncio.timeout(ASK_S), AsyncExitStack() as stack:
            client = await stack.enter_async_context(aiohttp.ClientSession())
            most = _held(await asyncio.gather(*(_ask(client, url, stack) for _ in range(needed))))
    except (TimeoutError, aiohttp.ClientError, OSError):
        pass  # it refused none in time; an episode without a session fails with that reason
    return most


async def _ask(client: Any, url: str, stack: AsyncExitStack) -> str:
    """Open a session, which ends with `stack`, and return the server's first message."""
    socket = await stack.enter_async_context(client.ws_connect(url))
    with contextlib.suppress(ConnectionError):  # it has refused and closed; its message is still to be read
        await socket.send_str(ASK)
    return str((await socket.receive()).data)


def _held(answers: Sequence[str]) -> int | None:
    """Return the number in a refusal."""
    for answer in answers:
        try:
            error = json.loads(answer)["data"]
            if error.get("code") == CAPACITY:
                return int(error["max_sessions"])
        except (ValueError, LookupError, TypeError, AttributeError):
            continue  # an answer of another kind
    return None
