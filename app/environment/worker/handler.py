"""Runs episodes in a worker process."""

import asyncio
import faulthandler
import importlib
import itertools
import os
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from app.environment.kinds import Make, load_environment
from app.environment.protocol import Renderer
from app.environment.wire import CODEC, Answer, End, Limits, SampleRequest
from app.environment.worker.episode import Episode
from app.environment.worker.policy import EpisodePolicy
from app.utils.user_code import LoadError, error_text
from app.worker.process import STDERR, limit_memory, log
from app.worker.wire import Begin, Close, Closed, Failed, Heartbeat, LineProtocol, WireError

BEAT_SECONDS = 1.0
MAX_SILENCE_SECONDS = 10.0  # without a beat; then all stacks go to the log
ENDPOINT = "app.environment.worker.openai_endpoint.endpoint"  # imported by its first use


def load(settings: Mapping[str, Any]) -> "EnvironmentHandler":
    """Load the environment and the renderer. Raises `LoadError`, whose message is a sentence."""
    make = load_environment(settings)
    renderer = _load_renderer(settings["renderer"])
    limit_memory(settings["memory_gib"])
    return EnvironmentHandler(make, renderer, Limits(**settings["limits"]), settings["environment"])


class EnvironmentHandler:
    """Plays the episodes of one worker process."""

    def __init__(self, make: Make, renderer: Renderer, limits: Limits, framing: Mapping[str, Any]) -> None:
        self.info: Mapping[str, Any] = getattr(make, "info", {})
        self._make = make
        self._renderer = renderer
        self._limits = limits
        self._framing = framing
        self._lines = LineProtocol(CODEC, self._receive, self._ended)
        self._episodes: dict[int, Episode] = {}
        self._requests: dict[int, asyncio.Future[Answer]] = {}
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._beating: asyncio.Task[None] | None = None
        self._server: Any = None  # the endpoint, once an episode uses it

    def serve(self, pipe: socket.socket) -> None:
        """Play episodes. Does not return: the process ends with the pipe."""
        asyncio.run(self._serve(pipe))

    async def _serve(self, pipe: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self._lines, sock=pipe)
        await loop.create_future()  # never done: `_ended` ends the process

    def _receive(self, message: Any) -> None:
        match message:
            case Begin():
                self._begin(message)
            case Answer():
                future = self._requests.pop(message.number, None)
                if future is not None and not future.done():
                    future.set_result(message)
            case Close():
                if message.job in self._episodes:
                    self._episodes[message.job].abort(force=message.force)

    def _ended(self, error: WireError | None) -> None:
        """Exit, without waiting for threads and tasks of environments, which may hang."""
        os._exit(0)

    def _begin(self, begin: Begin) -> None:
        """Begin an episode. It is registered at once: the next message may already close it."""
        number = begin.job
        resources = ExitStack()  # until the episode's end
        loop = asyncio.get_running_loop()

        def url(policy: EpisodePolicy) -> str:
            endpoint = self._endpoint(loop)  # a plain `run` asks for it in a thread
            connection = endpoint.open(policy)
            resources.callback(endpoint.shut, connection)
            return str(connection.url)

        def ask(
            sequence: int, context: Sequence[int], max_tokens: int | None, logprobs: bool
        ) -> "asyncio.Future[Answer]":
            request = SampleRequest(number, next(self._numbers), sequence, context, max_tokens, logprobs)
            future: asyncio.Future[Answer] = loop.create_future()
            self._requests[request.number] = future
            resources.callback(self._requests.pop, request.number, None)
            self._lines.send(request)
            return future

        episode = Episode(begin, self._make, ask, self._renderer, self._limits, self._framing, url)
        self._episodes[number] = episode
        if self._beating is None:
            self._beating = asyncio.ensure_future(self._beat())

        task = asyncio.ensure_future(self._play(episode, resources))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _play(self, episode: Episode, resources: ExitStack) -> None:
        number = episode.number
        outcome: End | Failed | Closed
        try:
            outcome = await episode.play()
        except Exception as error:  # ours: the episode still ends
            log("".join(traceback.format_exception(error)))
            kind = "memory" if isinstance(error, MemoryError) else "raised"
            outcome = Failed(number, kind, f"the worker raised {error_text(error)}", stuck=True)

        del self._episodes[number]
        resources.close()
        self._lines.send(outcome)

    def _endpoint(self, loop: asyncio.AbstractEventLoop) -> Any:
        if self._server is None:
            self._server = importlib.import_module(ENDPOINT).Endpoint(loop, log)
        return self._server

    async def _beat(self) -> None:
        """Beat while any episode runs. When the loop stands still, a thread without the GIL writes all stacks."""
        for number in itertools.count():
            if not self._episodes:
                break
            self._lines.send(Heartbeat(number))
            faulthandler.dump_traceback_later(MAX_SILENCE_SECONDS, exit=False, file=STDERR)
            await asyncio.sleep(BEAT_SECONDS)
        faulthandler.cancel_dump_traceback_later()
        self._beating = None


def _load_renderer(choice: Mapping[str, Any]) -> Renderer:
    """Return `renderer_for` of these arguments. Raises `LoadError`, whose message is a sentence."""
    from app.environment.rendering import renderer_for

    try:
        return renderer_for(**choice)
    except Exception as error:  # a missing package, or what a tokenizer's files hold
        problem = str(error) if isinstance(error, ValueError) else error_text(error)
        raise LoadError(
            f"The renderer {choice['name']} of {choice['model_path']} cannot be used in {sys.executable}: "
            f"{problem.rstrip('.')}."
        ) from error
