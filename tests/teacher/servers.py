"""A server: the real SGLang with a tokenizer, as a teacher is, or handlers that answer in its place."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from app.rollout.engine.client import Client
from app.rollout.engine.server import HOST, Server
from tests.conftest import server_spec

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Address:
    """Where a server is, and its key."""

    url: str
    key: str


@asynccontextmanager
async def sglang(model: Path, folder: Path) -> AsyncIterator[Address]:
    """Serve a model directory with SGLang."""
    server = Server(server_spec(model, folder, name="teacher", skip_tokenizer_init=False))
    await server.start()
    url = f"http://{HOST}:{server.spec.port}"
    client = Client("teacher", url, server.spec.key)
    try:
        for _ in range(600):
            if await client.healthy():
                break
            await asyncio.sleep(0.1)
        yield Address(url, str(server.spec.key))
    finally:
        await client.close()
        await server.stop()


@asynccontextmanager
async def serving(**routes: Handler) -> AsyncIterator[str]:
    """Serve handlers in this process, each at the route of its name."""
    application = web.Application()
    for name, handler in routes.items():
        application.router.add_route("*", f"/{name}", handler)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
