"""The policy as an HTTP server on the loopback interface, for agents that bring a client of their own.

    http://127.0.0.1:<port>/<secret>/v1/models, …/v1/chat/completions       OpenAI's
    http://127.0.0.1:<port>/<secret>/inference/v1/generate                  vLLM's: tokens in, tokens out

The secret names an episode and cannot be guessed. All episodes of a worker share one server.

Invariants:
- An agent receives what the policy sampled: nothing is streamed, repaired or sampled a second time.
- Sampling belongs to the run: temperature, top_p and the like of a request are ignored, with one warning.
- A limit of the episode is status 400, which OpenAI's clients do not retry; nothing was sampled then.
"""

import asyncio
import secrets
import socket
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any

from app.environment.protocol import EpisodeOver, Message, OutOfTokens, Policy
from app.environment.worker.openai_endpoint import openai_api
from app.environment.worker.openai_endpoint.http_server import HEAD_BYTES, HttpRequest, serve_connection
from app.environment.worker.openai_endpoint.openai_api import Refusal
from app.environment.worker.sequences import message_key

SESSION_HEADER = "X-Session-ID"
# Clients know an overflow by these words or by its code, and shorten the conversation or end it.
OUT_OF_TOKENS = "This model's maximum context length is reached: the episode has no tokens left."


@dataclass(eq=False)
class Connection:
    """One episode of the server."""

    url: str  # base URL for an OpenAI client
    policy: Policy
    replies: dict[str, list[Message]] = field(default_factory=dict)  # by the key of what the agent was sent
    reply_count: int = 0
    running: set[asyncio.Task[Mapping[str, Any]]] = field(default_factory=set)
    over: EpisodeOver | None = None  # the limit that a request ran into


class Endpoint:
    """The HTTP server of a worker. It listens from the first `open` until the worker's event loop ends.

    Args:
        loop: The worker's event loop, where policies are called. `open` and `shut` may be called in other threads.
        warn: Called once, with a sentence, for each request setting that has no effect.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, warn: Callable[[str], None]) -> None:
        self._loop = loop
        self._warn = warn
        self._warned: set[str] = set()
        self._connections: dict[tuple[str, str], Connection] = {}  # by secret and session
        self._shared = secrets.token_urlsafe(24)
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def open(self, policy: Policy, session: str | None = None) -> Connection:
        """Serve an episode from now on.

        With a `session`, its requests have the header X-Session-ID and go to one URL, so that one client serves all
        episodes. Without, the episode has a secret, and so a URL, of its own.
        """
        origin = self._listen()
        secret = secrets.token_urlsafe(24) if session is None else self._shared
        connection = Connection(f"{origin}/{secret}/v1", policy)
        self._connections[secret, session or ""] = connection
        return connection

    @property
    def shared_url(self) -> str:
        """Base URL of the episodes that were opened with a session."""
        return f"{self._listen()}/{self._shared}/v1"

    def shut(self, connection: Connection) -> None:
        """End an episode: requests in flight are cancelled, later ones get 404. Idempotent."""
        self._connections = {key: other for key, other in self._connections.items() if other is not connection}
        for task in tuple(connection.running):
            self._loop.call_soon_threadsafe(task.cancel)

    def _listen(self) -> str:
        with self._lock:
            if self._socket is None:
                self._socket = socket.create_server(("127.0.0.1", 0), backlog=512)
                asyncio.run_coroutine_threadsafe(self._serve(self._socket), self._loop)
            return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    async def _serve(self, listening: socket.socket) -> None:
        connected = partial(serve_connection, handler=self._answer)
        async with await asyncio.start_server(connected, sock=listening, limit=HEAD_BYTES) as server:
            await server.serve_forever()

    async def _answer(self, request: HttpRequest) -> tuple[int, Mapping[str, Any]]:
        """Answer a request; errors have OpenAI's shape, and no client tries them again."""
        try:
            return HTTPStatus.OK, await self._serve_request(request)
        except Refusal as refusal:
            return refusal.status, refusal.body
        except Exception as error:  # whatever the policy or its renderer raises ends this request only
            failed = Refusal(f"{type(error).__name__}: {error}", HTTPStatus.INTERNAL_SERVER_ERROR)
            return failed.status, failed.body

    async def _serve_request(self, request: HttpRequest) -> Mapping[str, Any]:
        _, secret, *rest = request.path.partition("?")[0].split("/")
        route = f"{request.method} /{'/'.join(rest)}"
        if route == "GET /v1/models" and secret == self._shared:
            return openai_api.models_response()  # requested without a session

        session = request.headers.get(SESSION_HEADER.lower(), "") if secret == self._shared else ""
        connection = self._connections.get((secret, session))
        if connection is None:
            raise Refusal("There is no such episode, or it is over.", HTTPStatus.NOT_FOUND)
        if route == "GET /v1/models":
            return openai_api.models_response()

        calls = {"POST /v1/chat/completions": self._chat, "POST /inference/v1/generate": self._generate}
        if route not in calls:
            served = ", ".join(["GET /v1/models", *calls])
            raise Refusal(f"{route} is not served, only {served}.", HTTPStatus.NOT_FOUND)
        return await self._run(connection, calls[route](connection, openai_api.read_json(request.body)))

    async def _run(self, connection: Connection, call: Coroutine[Any, Any, Mapping[str, Any]]) -> Mapping[str, Any]:
        """Run one request of an episode; `shut` cancels the request."""
        task = self._loop.create_task(call)
        connection.running.add(task)
        try:
            return await task
        except EpisodeOver as over:
            connection.over = over
            if isinstance(over, OutOfTokens):
                raise Refusal(OUT_OF_TOKENS, code="context_length_exceeded") from None
            ended = f"The policy is not sampled again in this episode ({over.ending})."
            raise Refusal(ended, code="episode_over") from None
        except asyncio.CancelledError:
            if task.cancelled() and connection not in self._connections.values():
                raise Refusal("The episode is over.", HTTPStatus.NOT_FOUND) from None
            task.cancel()
            raise
        finally:
            connection.running.discard(task)

    async def _chat(self, connection: Connection, body: Mapping[str, Any]) -> Mapping[str, Any]:
        messages, tools, max_tokens = openai_api.read_chat(body, connection.replies)
        self._warn_of(openai_api.ignored_keys(body))

        reply = await connection.policy(messages, tools=tools, max_tokens=max_tokens)
        connection.reply_count += 1
        message = openai_api.chat_message(reply, connection.reply_count)
        connection.replies.setdefault(message_key(openai_api.read_messages([message])[0]), []).append(reply.message)
        return openai_api.chat_answer(message, reply, body.get("model"))

    async def _generate(self, connection: Connection, body: Mapping[str, Any]) -> Mapping[str, Any]:
        token_ids, max_tokens = openai_api.read_generate(body)
        self._warn_of(openai_api.ignored_keys(body.get("sampling_params") or {}))

        sampled = await connection.policy.generate(token_ids, max_tokens=max_tokens, logprobs=True)
        return openai_api.generate_answer(sampled)

    def _warn_of(self, ignored: Iterable[str]) -> None:
        for key in ignored:
            if key not in self._warned:
                self._warned.add(key)
                self._warn(f"The agent's {key} has no effect: the run's rollout settings decide how is sampled.")
