"""One trainer rank for all quick tests. At the end the session's engine gets its original weights back."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rollout.support import address_of, engine_at
from tests.weight_sync.support import Proxy, killed, make_trainer, restore, started


@pytest.fixture(scope="package")
def trainer(
    ray_session: None, tiny_model: Path, engine: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("trainer")
    made = asyncio.run(started(make_trainer(tiny_model, folder)))
    with killed(*made.ranks):
        yield made
        asyncio.run(restore(made, engine, folder))


@pytest.fixture(scope="package")
def proxy_and_engine(engine: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Proxy, Any]]:
    """A proxy in front of the session's server, and an engine that connects to the proxy."""
    url, key = asyncio.run(address_of(engine))
    proxy = Proxy(url)
    proxied = engine_at(proxy.url, key, tmp_path_factory.mktemp("proxied"), "engine behind a proxy")
    asyncio.run(proxied.start(60))
    with killed(proxied.actor):
        yield proxy, proxied
    proxy.stop()


@pytest.fixture
def proxied(proxy_and_engine: tuple[Proxy, Any]) -> tuple[Proxy, Any]:
    """`proxy_and_engine` without any rule."""
    proxy_and_engine[0].rules.clear()
    proxy_and_engine[0].seen.clear()
    return proxy_and_engine
