"""The driver's environment workers, and the episodes that run in them."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.environment.protocol import Task
from app.environment.wire import CODEC, Limits, RendererChoice
from app.errors import ConfigError
from app.utils.user_code import LoadError
from app.worker.pool import WorkerPool
from app.worker.remote import Job, WorkerSpec

START_TIMEOUT_S = 120.0  # includes the imports of the environment


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """The specification of an environment worker, in JSON values."""

    environment: Mapping[str, Any]  # `kind`, and what its module's `make` takes: `target` and `args` for `own`, …
    renderer: RendererChoice
    limits: Limits
    memory_gib: float = 8.0  # data that a worker, or a child of it, may allocate
    python: str | None = None  # interpreter, with its own packages; None: ours, with what the driver can import


class EnvironmentPool(WorkerPool):
    """Worker processes, each of which plays several episodes at once. Used on one event loop.

    Lifecycle: start → begin* → close. Each plays up to `episodes` at once; `warn` gets a sentence when one is replaced.
    """

    def __init__(
        self, spec: EnvironmentSpec, *, workers: int, episodes: int, log: Path | None, warn: Callable[[str], None]
    ) -> None:
        settings = dataclasses.asdict(spec)
        python = settings.pop("python")
        handler = f"{__package__}.worker.handler"
        worker = WorkerSpec(
            "the environment", handler, settings, CODEC, START_TIMEOUT_S, python, log, spec.limits.timeout_s
        )
        super().__init__(worker, workers=workers, jobs=episodes, warn=warn)

    async def start(self) -> None:
        """Start all workers. Raises `ConfigError` if they cannot load the environment; else as `start_workers`."""
        try:
            await self.start_workers()
        except LoadError as error:
            raise ConfigError("", "", reason=str(error)) from error
        except OSError as error:
            accepted = "a Python that can be run"
            raise ConfigError("environment.python", self.spec.python, accepted, str(error.strerror)) from error

    async def begin(self, task: Task, prompt_ids: Sequence[int]) -> Job:
        """Begin an episode in the least busy worker; waits for a free slot.

        Example::

            session = await pool.begin(task, prompt_ids)
            try:
                while isinstance(ask := await session.next(), SampleRequest):
                    session.reply(ask, Answer(ask.number, token_ids, "stop"))
            finally:
                await session.close()
        """
        fields = {each.name: getattr(task, each.name) for each in dataclasses.fields(task)}
        return await self.begin_job({"task": fields, "prompt": prompt_ids})
