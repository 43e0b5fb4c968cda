"""A small HTTP/1.1 server on asyncio streams for JSON requests of local clients. Standard library only.

Not for the open network: it listens on 127.0.0.1, reads bodies of a known, bounded length and streams nothing.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from app.environment.worker.openai_endpoint.openai_api import Refusal

HEAD_BYTES = 64 << 10  # request line and headers
BODY_BYTES = 64 << 20  # a conversation of a million tokens has about 8 MB as token ids


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """One request. `headers` have lower-case names."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


Handler = Callable[[HttpRequest], Awaitable[tuple[int, Mapping[str, Any]]]]  # status, and the answer as JSON


async def serve_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handler: Handler) -> None:
    """Answer the requests of one connection, in order, until the client closes it or sends what is not read."""
    try:
        while (request := await _read(reader, writer)) is not None:
            status, answer = await handler(request)
            close = request.headers.get("connection", "").lower() == "close"
            await _write(writer, status, answer, close)
            if close:
                return
    except Refusal as error:
        await _write(writer, error.status, error.body, close=True)
    except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
        return  # the client went away, or the event loop ends
    finally:
        writer.close()


async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> HttpRequest | None:
    """The next request; `None` where the client closed the connection between two."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return None
    except asyncio.LimitOverrunError:
        raise Refusal("The headers are too large.", HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE) from None

    method, path, headers = _parse_head(head)
    length = _body_length(headers)
    if headers.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        await writer.drain()
    return HttpRequest(method, path, headers, await reader.readexactly(length))


def _parse_head(head: bytes) -> tuple[str, str, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise Refusal("This is not an HTTP/1.1 request.")

    headers = {}
    for line in filter(None, lines):
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return words[0], words[1], headers


def _body_length(headers: Mapping[str, str]) -> int:
    """Bytes of the body, from `Content-Length`."""
    if "transfer-encoding" in headers:
        raise Refusal("Send the body with a Content-Length; chunks are not read.", HTTPStatus.LENGTH_REQUIRED)

    text = headers.get("content-length", "0")
    if not (text.isascii() and text.isdigit()):
        raise Refusal(f"Content-Length: {text[:40]} is not a number of bytes.")
    if len(text) > 12 or int(text) > BODY_BYTES:
        raise Refusal(f"The body is larger than {BODY_BYTES >> 20} MiB.", HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
    return int(text)


async def _write(writer: asyncio.StreamWriter, status: int, answer: Mapping[str, Any], close: bool) -> None:
    body = json.dumps(answer).encode()
    final = "" if status == HTTPStatus.OK else "x-should-retry: false\r\n"  # OpenAI's clients obey it
    head = (
        f"HTTP/1.1 {int(status)} {HTTPStatus(status).phrase}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        f"Connection: {'close' if close else 'keep-alive'}\r\n{final}\r\n"
    )
    writer.write(head.encode() + body)
    await writer.drain()
