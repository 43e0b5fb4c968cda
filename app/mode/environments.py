"""The environment of a run: what its workers get from the configuration, and whether they can load it."""

import asyncio
import re
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from app.config import RunConfig
from app.config.data import Template
from app.environment.pool import EnvironmentPool
from app.environment.remote import WorkerSpec
from app.environment.rendering import family_of
from app.environment.wire import Limits, RendererChoice
from app.errors import ConfigError, RunError

LOG = "environment.log"


def worker_spec(config: RunConfig, model_path: Path) -> WorkerSpec:
    """Return what each worker runs.

    Raises:
        ConfigError: The model's chat format is not known.
    """
    settings = config.environment
    limits = Limits(
        settings.max_turns,
        settings.max_turn_tokens,
        settings.max_observation_tokens,
        settings.timeout_s,
        settings.episode_s,
    )
    environment = {
        "kind": settings.module,
        "target": settings._target_,
        "args": dict(settings.args),
        "tools": list(settings.tools),
        "id": settings.id,
        "url": settings.url,
        "system": config.data.system,
        "prefix": config.data.prefix,
        "suffix": config.data.suffix,
    }
    return WorkerSpec(environment, _renderer(config, model_path), limits, settings.memory_gib, settings.python)


def _renderer(config: RunConfig, model_path: Path) -> RendererChoice:
    try:
        family = family_of(model_path, config.data.template is Template.chat)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return RendererChoice(family, str(model_path), config.environment.thinking.value, config.data.thinking)


def require_environment(config: RunConfig, model_path: Path) -> None:
    """Start one worker, which loads the environment and the renderer, and end it.

    Raises:
        ConfigError: They cannot be loaded.
    """

    async def start() -> None:
        async with tried_pool(config, model_path):
            pass

    asyncio.run(start())


@asynccontextmanager
async def tried_pool(config: RunConfig, model_path: Path) -> AsyncIterator[EnvironmentPool]:
    """Yield a pool of one worker, which writes no log that stays.

    Raises:
        ConfigError: The environment or its renderer cannot be loaded.
    """
    with tempfile.TemporaryDirectory(prefix="environment-") as folder:
        log = Path(folder) / LOG
        pool = EnvironmentPool(worker_spec(config, model_path), workers=1, episodes=1, log=log, warn=lambda _: None)
        try:
            await pool.start()
            yield pool
        except RunError as error:
            sentence = without_log(str(error)).removesuffix(".")
            raise ConfigError(f"{sentence}{_last_line(log)}.") from error
        finally:
            pool.close()
            await asyncio.sleep(0)  # closes its pipe


def without_log(text: str) -> str:
    """Return a sentence about a worker of `tried_pool` without the log, which is gone when it is read."""
    return re.sub(rf"; log: \S+/{LOG}", "", text)


def _last_line(log: Path) -> str:
    """Return what a worker wrote last, for a sentence."""
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    written = [line.strip() for line in lines if line.strip()]
    return f"; its last line: {written[-1].rstrip('.')}" if written else ""
