"""The loop of a worker: episodes begin, ask and end as the driver's messages come.

Invariants:
- The worker dies with its parent, even if the parent is killed: the kernel sends SIGKILL (Linux).
- Ctrl-C and SIGTERM are handled by the driver, so that environments can be closed; the worker ignores them.
- Only the event loop writes to the pipe. What an environment prints goes to the log.
"""

import asyncio
import faulthandler
import importlib
import itertools
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from app.environment.wire import (
    Answer,
    Ask,
    Beat,
    Begin,
    Close,
    Closed,
    End,
    Failed,
    Limits,
    Lines,
    Ready,
    Refused,
    RendererChoice,
    Start,
    WireError,
)
from app.environment.worker.episode import Episode, Make
from app.environment.worker.framing import Framing
from app.environment.worker.log import STDERR, log
from app.environment.worker.policy import EpisodePolicy
from app.environment.worker.strands import Renderer
from app.utils.child_process import die_with_parent
from app.utils.dotted_path import LoadError, error_text

BEAT_S = 1.0
SILENT_S = 10.0  # without a beat; then all stacks go to the log
GIB = 1 << 30
ENDPOINT = "app.environment.worker.openai_endpoint.endpoint"  # imported by its first use


def serve(descriptor: int, parent: int) -> None:
    """Serve the driver until it closes the pipe. Does not return."""
    die_with_parent(parent)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave_to_the_driver)
    os.set_inheritable(descriptor, False)
    os.register_at_fork(after_in_child=lambda: os.close(descriptor))  # a child of an environment has no part in it
    sys.path.insert(0, os.getcwd())

    asyncio.run(_serve(socket.socket(fileno=descriptor)))


def _leave_to_the_driver(number: int, frame: Any) -> None:
    """Do nothing. Unlike an ignored signal, this is not inherited by what an environment starts."""


async def _serve(pipe: socket.socket) -> None:
    worker = Worker()
    await worker.loop.create_connection(lambda: worker.lines, sock=pipe)
    await worker.loop.create_future()  # never done: `_ended` ends the process


class Worker:
    """Plays the episodes of one worker process.

    Attributes:
        lines: The worker's end of the pipe.
        loop: The event loop.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.lines = Lines(self._receive, self._ended)
        self._make: Make = _not_loaded
        self._renderer: Renderer | None = None
        self._limits: Limits | None = None
        self._framing: Framing | None = None
        self._episodes: dict[int, Episode] = {}
        self._asks: dict[int, asyncio.Future[Answer]] = {}
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._beating: asyncio.Task[None] | None = None
        self._server: Any = None  # the endpoint, once an episode uses it

    def _receive(self, message: Any) -> None:
        match message:
            case Start():
                self._start(message.settings)
            case Begin():
                self._begin(message)
            case Answer():
                future = self._asks.pop(message.ask, None)
                if future is not None and not future.done():
                    future.set_result(message)
            case Close():
                if message.episode in self._episodes:
                    self._episodes[message.episode].abort(at_once=message.at_once)

    def _ended(self, error: WireError | None) -> None:
        """Exit, without waiting for threads and tasks of environments, which may hang."""
        os._exit(0)

    def _start(self, settings: Mapping[str, Any]) -> None:
        try:
            self._limits = Limits(**settings["limits"])
            self._framing = Framing.of(settings["environment"])
            self._make = _load_environment(settings)
            self._renderer = _load_renderer(RendererChoice(**settings["renderer"]))
            _limit_memory(settings["memory_gib"])
        except LoadError as error:
            self.lines.send(Refused(str(error)))
            return

        self.lines.send(Ready(dict(getattr(self._make, "info", {}))))

    def _begin(self, begin: Begin) -> None:
        """Begin an episode. It is known at once: the next message may already close it."""
        assert self._renderer is not None
        assert self._limits is not None
        assert self._framing is not None
        number = begin.episode
        asks: set[int] = set()
        seats: list[Any] = []  # at the endpoint

        def url(policy: EpisodePolicy) -> str:
            seats.append(self._endpoint().open(policy))
            base_url: str = seats[-1].url
            return base_url

        def ask(strand: int, append: Sequence[int], max_tokens: int | None, logprobs: bool) -> "asyncio.Future[Answer]":
            request = Ask(next(self._numbers), number, strand, append, max_tokens, logprobs)
            future: asyncio.Future[Answer] = self.loop.create_future()
            self._asks[request.number] = future
            asks.add(request.number)
            self.lines.send(request)
            return future

        episode = Episode(begin, self._make, ask, self._renderer, self._limits, self._framing, url)
        self._episodes[number] = episode
        if self._beating is None:
            self._beating = asyncio.ensure_future(self._beat())

        task = asyncio.ensure_future(self._play(episode, asks, seats))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _play(self, episode: Episode, asks: Iterable[int], seats: Iterable[Any]) -> None:
        number = episode.number
        outcome: End | Failed | Closed
        try:
            outcome = await episode.play()
        except Exception as error:  # ours: the episode still ends
            log("".join(traceback.format_exception(error)))
            kind = "memory" if isinstance(error, MemoryError) else "raised"
            outcome = Failed(number, kind, f"the worker raised {error_text(error)}", stuck=True)

        del self._episodes[number]
        for each in asks:
            self._asks.pop(each, None)
        for seat in seats:
            self._endpoint().shut(seat)
        self.lines.send(outcome)

    def _endpoint(self) -> Any:
        """Return the HTTP server of this worker's episodes."""
        if self._server is None:
            self._server = importlib.import_module(ENDPOINT).Endpoint(self.loop, log)
        return self._server

    async def _beat(self) -> None:
        """Beat while any episode runs. When the loop stands still, a thread without the GIL writes all stacks."""
        for number in itertools.count():
            if not self._episodes:
                break
            self.lines.send(Beat(number))
            faulthandler.dump_traceback_later(SILENT_S, exit=False, file=STDERR)
            await asyncio.sleep(BEAT_S)
        faulthandler.cancel_dump_traceback_later()
        self._beating = None


def _not_loaded() -> Any:
    raise RuntimeError("an episode began before the environment was loaded")


def _load_environment(settings: Mapping[str, Any]) -> Make:
    """Return what makes an environment: what `make` of the module of this kind returns.

    Args:
        settings: Of the `Start` message. `make` gets them with those of `limits` and `environment` beside them. The
            attribute `info` of what it returns, if there is one, goes to the driver.

    Raises:
        LoadError: It cannot be loaded. The message is a sentence.
    """
    environment = settings["environment"]
    kind = environment["kind"]
    key = f"environment._target_={environment['target']}" if kind == "own" else f"environment={kind}"
    try:
        make: Callable[[Mapping[str, Any]], Make] = importlib.import_module(f"app.environment.{kind}").make
        return make({**settings, **settings["limits"], **environment})
    except ValueError as error:
        raise LoadError(str(error)) from error  # a sentence of our own
    except LoadError as error:
        problem = str(error)
    except Exception as error:  # custom code and packages can raise anything
        problem = error_text(error)
    raise LoadError(f"{key} cannot be used: {problem}; the interpreter is {sys.executable}.")


def _load_renderer(choice: RendererChoice) -> Renderer:
    from app.environment.rendering import renderer_for

    try:
        renderer: Renderer = renderer_for(*astuple(choice))
    except Exception as error:  # a missing package, or what a tokenizer's files hold
        problem = str(error) if isinstance(error, ValueError) else error_text(error)
        raise LoadError(
            f"The renderer {choice.name} of {choice.model_path} cannot be used in {sys.executable}: "
            f"{problem.rstrip('.')}."
        ) from error
    return renderer


def _limit_memory(gib: float) -> None:
    """Limit the data of this process and of each child, without what is only reserved.

    Raises:
        LoadError: This process has more already. The message is a sentence.
    """
    status = Path("/proc/self/status").read_text()
    allocated = int(status.partition("VmData:")[2].split()[0]) << 10
    if allocated > gib * GIB:
        raise LoadError(
            f"environment.memory_gib={gib:g} is not accepted: give more than {allocated / GIB:.2g}, which the worker "
            "has allocated before the first episode."
        )

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = int(gib * GIB)
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
