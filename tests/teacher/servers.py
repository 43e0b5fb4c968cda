"""A teacher's server: the real SGLang with a tokenizer, or a double that answers as it is asked to."""

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
async def double(generate: Handler, tokenize: Handler | None = None) -> AsyncIterator[str]:
    """Serve handlers of the teacher's two routes."""
    application = web.Application()
    application.router.add_post("/generate", generate)
    if tokenize is not None:
        application.router.add_post("/tokenize", tokenize)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
