"""HTTP client of an SGLang server. Replies become numpy arrays; nothing received is unpickled."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Any

import aiohttp
import numpy as np
import orjson

from app.errors import EngineError
from app.rollout.engine.sglang_plugin.entry_points import REPORT
from app.types import Completion, FinishReason, GroupRequest, VersionSpan

CONNECT_TIMEOUT_S = 10.0
CALL_TIMEOUT_S = 600.0
Report = Mapping[str, int | None]  # sampled tokens of unfinished requests by request id; None: queued


class ConnectionLost(EngineError):
    """The server could not be reached, or the connection broke during a call."""


class NoAnswer(EngineError):
    """The server accepted a call and did not reply within its deadline."""


class KeyRefused(EngineError):
    """The server does not accept our key."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply of `/generate`."""

    completion: Completion
    abort_reason: str | None  # SGLang's, if it was aborted
    tokens_at_once: int = 1  # that a pass can sample: above 1 with drafts


class Client:
    """The client of one server.

    Raises (every call):
        EngineError: The server refused the call: an HTTP status other than 200, or `success: false`.
        ConnectionLost: The server could not be reached, or the connection broke.
        NoAnswer: No reply within `seconds`.
    """

    def __init__(self, name: str, url: str, key: str | None):
        self.name = name
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session = aiohttp.ClientSession(
            headers=headers,
            json_serialize=lambda body: orjson.dumps(body).decode(),
            # A new connection for each request: the server may close a kept one just when it is used again.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        )
        # One thread: several would compete with the event loop for Python's lock.
        self._parser = ThreadPoolExecutor(1)

    async def close(self) -> None:
        await self._session.close()
        self._parser.shutdown(wait=False)

    async def healthy(self, route: str = "/health", seconds: float = 5.0) -> bool:
        """Return whether `route` answers with HTTP 200. `/health_generate` also needs progress of the scheduler."""
        try:
            timeout = aiohttp.ClientTimeout(total=seconds)
            async with self._session.get(self.url + route, timeout=timeout) as reply:
                self._check_key(reply)
                return reply.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def get(self, route: str, *, seconds: float | None = CALL_TIMEOUT_S) -> Any:
        return await self._call("GET", route, None, seconds)

    async def post(self, route: str, body: Mapping[str, Any], *, seconds: float | None = CALL_TIMEOUT_S) -> Any:
        return await self._call("POST", route, body, seconds)

    async def unfinished(self, seconds: float) -> Report | None:
        """Return the server's report on its unfinished requests; None if it runs without our plugin."""
        states = (await self.get("/server_info", seconds=seconds)).get("internal_states") or []
        reports = [state[REPORT] for state in states if REPORT in state]
        return {request_id: tokens for report in reports for request_id, tokens in report.items()} if reports else None

    async def generate(
        self, request: GroupRequest, request_ids: Sequence[str], *, cache_key: str, adapter: str | None = None
    ) -> list[Reply]:
        """Sample a group with one call. It has no deadline: the host watches the server's progress.

        Args:
            request: The prompt and how to sample it. `version` is the adapter's, if there is one.
            request_ids: One for each member; `/abort_request` takes them.
            cache_key: Prefixes are reused only from requests with the same key.
            adapter: The name of a loaded adapter to sample with.
        """
        sampling = request.sampling
        prompt = request.token_ids.tolist()
        body: dict[str, Any] = {
            "input_ids": [prompt] * request.group_size,
            "rid": list(request_ids),
            "extra_key": cache_key,
            "lora_path": adapter,
            "sampling_params": {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": -1 if sampling.top_k is None else sampling.top_k,
                "max_new_tokens": sampling.max_tokens,
                "stop": list(sampling.stop),
            },
            "return_logprob": True,
            "stream": False,
        }

        replies = await self.post("/generate", body, seconds=None)
        if not isinstance(replies, list) or len(replies) != request.group_size:
            raise EngineError(f"{self.name}: /generate returned {len(replies)} completions of {request.group_size}")
        return [await parse(reply, request.version, adapted=adapter is not None) for reply in replies]

    async def _call(self, method: str, route: str, body: Mapping[str, Any] | None, seconds: float | None) -> Any:
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_TIMEOUT_S)
        try:
            async with self._session.request(method, self.url + route, json=body, timeout=timeout) as reply:
                self._check_key(reply)
                status, text = reply.status, await reply.read()
        except aiohttp.ClientError as error:  # before TimeoutError: a connect timeout is both
            raise ConnectionLost(f"{self.name}: {route} failed: {type(error).__name__}: {error}") from error
        except TimeoutError:
            raise NoAnswer(f"{self.name}: no answer to {route} within {seconds:.0f} s") from None

        if status == 200 and text.startswith(b"["):
            return await asyncio.get_running_loop().run_in_executor(self._parser, parse_list, text)
        try:
            content = orjson.loads(text) if text else {}
        except orjson.JSONDecodeError:
            content = {"message": text[:500].decode(errors="replace")}

        fields = content if isinstance(content, dict) else {}
        if status != 200 or fields.get("success") is False:
            reasons = (fields.get(field) for field in ("message", "error_message", "error"))
            reason = next(filter(None, reasons), text[:500].decode(errors="replace"))
            raise EngineError(f"{self.name}: {route} was refused (HTTP {status}): {reason}")
        return content

    def _check_key(self, reply: aiohttp.ClientResponse) -> None:
        if reply.status in (401, 403):
            raise KeyRefused(f"{self.name} at {self.url} refused our key (HTTP {reply.status})")


# orjson holds Python's lock until it returns: for the 10 MB of 8 completions of 32,768 tokens, parsed at once in a
# thread, 0.5 s with the garbage collections that a list for each token starts. Between two members it changes hands.
def parse_list(text: bytes) -> list[Any]:
    """Parse a JSON list member by member; the triples of all tokens of a member become one flat list.

    All members begin with the same key. JSON escapes quotes within strings, so `,{"key":` is in none; a cut within a
    member leaves no JSON, and the list is parsed at once. `,null],[` may be in a completion's text, which is not read.

    >>> [each["pairs"] for each in parse_list(b'[{"pairs":[[-1,7,null],[-2,8,null]]},{"pairs":[[-3,9,null]]}]')]
    [[[-1, 7, None, -2, 8, None]], [[-3, 9, None]]]
    """
    following = b"," + text[1 : text.find(b":") + 1]
    members, begin, end = list[Any](), 0, 0
    try:
        while end != -1:
            end = text.find(following, begin + 1)
            members.append(orjson.loads(text[begin + 1 : end].replace(b",null],[", b",null,")))
            begin = end
    except orjson.JSONDecodeError:
        members = orjson.loads(text)
    return members


async def parse(reply: Mapping[str, Any], version: int, *, adapted: bool = False) -> Reply:
    """Return the completion in one reply of `/generate`.

    Args:
        version: The request's.
        adapted: Whether an adapter of `version` sampled all tokens; the server reports the version of its own weights.
    """
    # Long replies take milliseconds each: let other requests run in between.
    await asyncio.sleep(0)

    meta = reply["meta_info"]
    flat = list(chain.from_iterable(meta.get("output_token_logprobs") or []))
    logprobs = np.array(flat[0::3], dtype=np.float32)
    token_ids = np.array(flat[1::3], dtype=np.int32)

    finish = meta.get("finish_reason") or {"type": "abort", "message": "no finish reason"}
    reason = FinishReason(finish["type"])
    completion = Completion(
        token_ids,
        logprobs,
        reason,
        (VersionSpan(version, 0, len(token_ids)),) if adapted else spans(meta, len(token_ids), version),
        cached_tokens=int(meta.get("cached_tokens") or 0),
        verify_passes=int(meta.get("spec_verify_ct") or 0),
        retractions=int(meta.get("num_retractions") or 0),
    )
    drafted = int(meta.get("spec_num_proposed_drafts") or 0) // max(1, completion.verify_passes)
    return Reply(completion, str(finish.get("message")) if reason is FinishReason.abort else None, drafted + 1)


def spans(meta: Mapping[str, Any], tokens: int, version: int) -> tuple[VersionSpan, ...]:
    """Return the version spans that the server reports for a completion of `tokens` tokens.

    `version` is the last synced version when the request was made. It is used for all tokens if the reported spans are
    missing (older servers) or have a gap, and for spans whose version is not a number (weights that were never synced).
    """
    reported: list[VersionSpan] = []
    end = 0
    for span in meta.get("weight_versions") or []:
        if span["start"] == span["end"]:
            continue
        if span["start"] != end:
            break
        end = int(span["end"])
        number = str(span["version"])
        reported.append(VersionSpan(int(number) if number.isdigit() else version, int(span["start"]), end))

    if not reported or end != tokens:
        return (VersionSpan(version, 0, tokens),)
    return tuple(reported)


def spans_in_place(reported: Sequence[VersionSpan], version: int, tokens_at_once: int = 1) -> tuple[VersionSpan, ...]:
    """Return spans in which the first tokens after each sync, `tokens_at_once`, count as the previous version's.

    SGLang's overlap scheduler keeps one sampled batch through a sync in place and reports its tokens under the new
    version; with drafts it may have fewer tokens, and the rest counts as older than it is. If the first token of all is
    newer than `version`, it counts as the version before its own: each sync adds one.
    """
    starts: list[tuple[int, int]] = []  # version, first token
    for span in reported:
        synced_meanwhile = span.version > version
        if synced_meanwhile and not starts:
            starts.append((span.version - 1, 0))
        starts.append((span.version, min(span.start + synced_meanwhile * tokens_at_once, reported[-1].end)))

    ends = [*(start for _, start in starts[1:]), reported[-1].end]
    return tuple(
        VersionSpan(number, start, end) for (number, start), end in zip(starts, ends, strict=True) if start < end
    )
