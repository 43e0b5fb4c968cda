"""One trainer rank for all quick tests of a push; the session's engine gets its weights back at the end."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.config.weight_sync import Verify
from tests.weight_sync.support import Proxy, address_of, engine_at, make_push, make_trainer, set_weights, started


@pytest.fixture(scope="package")
def trainer(
    ray_session: None, tiny_model: Path, engine: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    import ray

    folder = tmp_path_factory.mktemp("trainer")
    made = asyncio.run(started(make_trainer(tiny_model, folder)))
    yield made
    asyncio.run(restore(made, engine, folder))
    for rank in made.ranks:
        ray.kill(rank)


async def restore(trainer: Any, engine: Any, folder: Path) -> None:
    await set_weights(trainer, 0)
    push = await make_push("ipc", trainer, [engine], folder, verify=Verify.never)
    await push.sync(0)
    await push.close()


@pytest.fixture(scope="package")
def behind(engine: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Proxy, Any]]:
    """A proxy in front of the session's server, and an engine that knows only the proxy."""
    import ray

    url, key = asyncio.run(address_of(engine))
    proxy = Proxy(url)
    face = engine_at(proxy.url, key, tmp_path_factory.mktemp("behind"), "engine behind a proxy")
    asyncio.run(face.start(60))
    yield proxy, face
    ray.kill(face.actor)
    proxy.stop()


@pytest.fixture
def proxied(behind: tuple[Proxy, Any]) -> tuple[Proxy, Any]:
    """The same, with nothing spoiled yet."""
    behind[0].rules.clear()
    behind[0].seen.clear()
    return behind
