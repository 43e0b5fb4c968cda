"""Frozen teachers, which score the tokens that the policy sampled: running SGLang servers, or an engine of the run.

    sequence   prompt │ sampled │ observation │ sampled          one request, without a new token
    teacher             [N₁]                    [N₂]     →       log-probabilities of the sampled tokens [N]

Invariants:
- A sequence is scored by one request, however many turns it has, at temperature 1: SGLang applies none to given tokens.
- Every request has the deadline `teacher.timeout_s`. A failed one is sent again to the next server, with exponential
  backoff, at most 5 times; then the run ends with the last error.
- The engine of `teacher.path` is made (`app/cluster/engine_factory.py`), started (`app/start/session.py`), restarted
  and ended as the engines of the policy are. Its requests wait meanwhile, within their deadline.
"""

import asyncio
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from app.config.teacher import ANY_SOURCE, MAX_REQUESTS, MAX_RETRY_DELAY_S, RETRIES, TeacherConfig
from app.errors import ConfigError, EngineError, RunError, one_line
from app.rollout.engine.client import Client, KeyRefused, NoAnswer
from app.rollout.engine.pool import EnginePool
from app.types import Group, TokenSequence, Trajectory
from app.utils.tasks import gather_or_raise

KEY = "POSTTRAIN_TEACHER_KEY"  # environment variable: the key of the servers
RETRY_DELAY_S = 0.5  # before a request is sent again; doubled each time
CHECK_TIMEOUT_S = 15.0
# Texts whose tokens differ between vocabularies.
PROBES = ("How much is 12+34=?", "def f(x):\n    return x ** 2  # naïve", "Die Wörter 你好, мир и 🙂\t1,234.5")


class EngineClient:
    """The engine of `teacher.path`, called through its host as a `Client` calls a server."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool

    async def post(self, route: str, body: Mapping[str, Any], *, seconds: float) -> Any:
        """Post a request. Raises as `Client` does, and `EngineLost` with the end of the log."""
        try:
            async with asyncio.timeout(seconds), self._pool.least_busy(1) as (_, engine):
                return await engine.update(route.removeprefix("/"), body)
        except TimeoutError:
            raise NoAnswer(f"no answer to {route} within {seconds:.0f} s: {self._pool.describe()}") from None


class Teacher:
    """One teacher, or one for each data source: the servers of `teacher.urls`, or the engine of `pool`.

    Example:
        async with Teacher(config.teacher) as teacher:
            group = await teacher.score(group)   # teacher_logprobs filled in
    """

    def __init__(self, config: TeacherConfig, pool: EnginePool | None = None) -> None:
        self.config = config
        self._engine = EngineClient(pool) if pool is not None else None
        self._clients: dict[str, list[Client]] = {}  # by the source that they score
        self._requests = itertools.count()
        self._slots = asyncio.Semaphore(MAX_REQUESTS)

    async def __aenter__(self) -> "Teacher":
        key = os.environ.get(KEY)
        for source, urls in self.config.servers.items():
            self._clients[source] = [Client(f"the teacher at {url}", url, key) for url in urls]
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(client.close() for clients in self._clients.values() for client in clients))

    async def score(self, group: Group) -> Group:
        """Return the group with the teacher's log-probabilities. Raises `RunError` if a server refuses or fails."""
        trajectories = await gather_or_raise(*(self._trajectory(each) for each in group.trajectories))
        return Group(group.prompt, tuple(trajectories))

    async def require_same_vocabulary(self, tokenizer: Any) -> None:
        """Raise `ConfigError` for a server that does not answer, refuses our key, or has other tokens."""
        for client in itertools.chain.from_iterable(self._clients.values()):
            try:
                body = {"model": "default", "prompt": list(PROBES), "add_special_tokens": False}
                reply = await client.post("/tokenize", body, seconds=CHECK_TIMEOUT_S)
            except EngineError as error:
                raise ConfigError("teacher.urls", client.url, "the address of a teacher", one_line(error)) from error
            _require_same("teacher.urls", client.url, reply.get("tokens"), tokenizer)

    async def _trajectory(self, trajectory: Trajectory) -> Trajectory:
        prompt = trajectory.prompt
        own = [] if self._engine is None else [self._engine]
        clients = own or self._clients.get(prompt.source) or self._clients[ANY_SOURCE]
        scored = await gather_or_raise(*(self._sequence(each, prompt.id, clients) for each in trajectory.sequences))
        return trajectory.with_teacher(scored)

    async def _sequence(
        self, sequence: TokenSequence, name: str, clients: Sequence[Client | EngineClient]
    ) -> np.ndarray:
        if not len(sequence.logprobs):
            return np.zeros(0, dtype=np.float32)

        first = next(self._requests)
        for attempt in itertools.count():
            client = clients[(first + attempt) % len(clients)]
            try:
                async with self._slots:
                    reply = await client.post("/generate", _request(sequence), seconds=self.config.timeout_s)
                return sampled_logprobs(reply, sequence)
            except (EngineError, ValueError) as error:
                if isinstance(error, KeyRefused):
                    raise
                if attempt >= RETRIES:
                    times = f"{attempt + 1} times"
                    raise RunError(f"the teacher failed to score prompt {name} {times}; the last: {error}") from error
            await asyncio.sleep(min(RETRY_DELAY_S * 2**attempt, MAX_RETRY_DELAY_S))
        raise AssertionError("unreachable")


def require_teacher(config: TeacherConfig, tokenizer: Any) -> None:
    """Raise `ConfigError` unless every server of the teacher can score the policy's tokens."""

    async def require() -> None:
        async with Teacher(config) as teacher:
            await teacher.require_same_vocabulary(tokenizer)

    asyncio.run(require())


def require_same_tokens(path: str, teacher: Any, tokenizer: Any) -> None:
    """Raise `ConfigError` unless the tokenizer of `teacher.path` encodes text as that of the policy does."""
    tokens = teacher(list(PROBES), add_special_tokens=False)["input_ids"]
    _require_same("teacher.path", path, tokens, tokenizer)


def _require_same(key: str, value: str, tokens: object, tokenizer: Any) -> None:
    if tokens != tokenizer(list(PROBES), add_special_tokens=False)["input_ids"]:
        why = "it encodes text into other tokens than model.path"
        raise ConfigError(key, value, "a model with the policy's tokenizer", why)


def sampled_logprobs(reply: Mapping[str, Any], sequence: TokenSequence) -> np.ndarray:
    """Read the log-probabilities [N] of the sampled tokens. Raises `ValueError` unless all are there and finite."""
    first = sequence.opening_tokens - 1  # the first entry: of a token before the sampled ones, without a number
    entries = reply.get("meta_info", {}).get("input_token_logprobs") or []
    if len(entries) != len(sequence.token_ids) - first:
        raise ValueError(f"it returned {len(entries)} log-probabilities of {len(sequence.token_ids) - first}")

    positions = np.flatnonzero(sequence.sampled) - first
    logprobs = np.array([math.nan if (value := entries[at][0]) is None else value for at in positions], np.float32)
    if not np.isfinite(logprobs).all():
        raise ValueError("it returned log-probabilities that are not finite")
    return logprobs


def _request(sequence: TokenSequence) -> dict[str, Any]:
    return {
        "input_ids": sequence.token_ids.tolist(),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": sequence.opening_tokens - 1,
        "stream": False,
    }
