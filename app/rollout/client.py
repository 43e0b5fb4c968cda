"""The HTTP side of an engine: requests out, numpy arrays back. Nothing received is unpickled."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import numpy as np

from app.errors import EngineError
from app.types import Completion, FinishReason, GroupRequest, VersionSpan

CONNECT_SECONDS = 10.0
CALL_SECONDS = 600.0


class ConnectionLost(EngineError):
    """The server could not be reached, or went away in the middle of a call."""


class NoAnswer(EngineError):
    """The server took the call and did not answer in time."""


class Client:
    """Speaks to one server."""

    def __init__(self, name: str, url: str, key: str | None):
        self.name, self.url = name, url.rstrip("/")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session = aiohttp.ClientSession(
            headers=headers,
            # a connection a request: one that was kept may be closed by the server just as it is used again
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
        )

    async def close(self) -> None:
        await self._session.close()

    async def healthy(self, route: str = "/health", seconds: float = 5.0) -> bool:
        """Whether the server answers; `/health_generate` asks for any progress of its scheduler."""
        try:
            timeout = aiohttp.ClientTimeout(total=seconds)
            async with self._session.get(self.url + route, timeout=timeout) as reply:
                self._check_key(reply)
                return reply.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def get(self, route: str, *, seconds: float | None = CALL_SECONDS) -> Any:
        """Raises `EngineError` like `post`."""
        return await self._call("GET", route, None, seconds)

    async def post(self, route: str, body: Mapping[str, Any], *, seconds: float | None = CALL_SECONDS) -> Any:
        """Raises `EngineError` when the server refuses, answers `success: false`, or not within `seconds`."""
        return await self._call("POST", route, body, seconds)

    async def _call(self, method: str, route: str, body: Mapping[str, Any] | None, seconds: float | None) -> Any:
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)
        try:
            async with self._session.request(method, self.url + route, json=body, timeout=timeout) as reply:
                return await self._read(reply, route)
        except aiohttp.ClientError as error:  # a connection that takes too long is both, and belongs here
            raise ConnectionLost(f"{self.name}: {route} failed: {type(error).__name__}: {error}") from error
        except TimeoutError:
            raise NoAnswer(f"{self.name}: no answer to {route} within {seconds:.0f} s") from None

    def _check_key(self, reply: aiohttp.ClientResponse) -> None:
        if reply.status in (401, 403):
            raise EngineError(f"{self.name} at {self.url} refused our key (HTTP {reply.status})")

    async def _read(self, reply: aiohttp.ClientResponse, route: str) -> Any:
        self._check_key(reply)
        text = await reply.text()
        try:
            answer = json.loads(text) if text else {}
        except json.JSONDecodeError:
            answer = {"message": text[:500]}
        refused = isinstance(answer, dict) and answer.get("success") is False
        if reply.status != 200 or refused:
            said = (
                answer.get("message") or answer.get("error") or text[:500] if isinstance(answer, dict) else text[:500]
            )
            raise EngineError(f"{self.name}: {route} was refused (HTTP {reply.status}): {said}")
        return answer

    async def generate(
        self, request: GroupRequest, names: Sequence[str], seeds: Sequence[int], *, cache: str
    ) -> list[Completion]:
        """One call for the whole group; each member has a name, which `/abort_request` takes, and a seed of its own.

        Prefixes are taken from the server's cache only where they were cached under the same word `cache`.
        """
        assert len(set(seeds)) == request.group_size, "the seeds of a group differ"
        sampling = request.sampling
        prompt = request.token_ids.tolist()
        body = {
            "input_ids": [prompt] * request.group_size,
            "rid": list(names),
            "extra_key": cache,
            "sampling_params": [
                {
                    "temperature": sampling.temperature,
                    "top_p": sampling.top_p,
                    "max_new_tokens": sampling.max_tokens,
                    "sampling_seed": seed,
                }
                for seed in seeds
            ],
            "return_logprob": True,
            "stream": False,
        }
        answers = await self.post("/generate", body, seconds=None)
        if not isinstance(answers, list) or len(answers) != request.group_size:
            raise EngineError(f"{self.name}: /generate gave {len(answers)} completions of {request.group_size}")
        return [await parse(answer, request.version) for answer in answers]


async def parse(answer: dict[str, Any], version: int) -> Completion:
    """One answer of `/generate`; lets other requests in between, since long answers take milliseconds."""
    await asyncio.sleep(0)
    meta = answer["meta_info"]
    pairs = meta.get("output_token_logprobs") or []
    token_ids = np.fromiter((pair[1] for pair in pairs), dtype=np.int32, count=len(pairs))
    logprobs = np.fromiter((pair[0] for pair in pairs), dtype=np.float32, count=len(pairs))
    reason = (meta.get("finish_reason") or {}).get("type", "abort")
    return Completion(token_ids, logprobs, FinishReason(reason), spans(meta, len(pairs), version))


def spans(meta: dict[str, Any], tokens: int, version: int) -> tuple[VersionSpan, ...]:
    """Version spans as the server reports them. What it does not report counts as sampled by `version`.

    That is the version pushed last when the request was made: all tokens where there are no spans (older servers), or
    none without a gap, and those of weights that no push brought, whose version is a word and not a number.
    """
    found, end = [], 0
    for span in meta.get("weight_versions") or []:
        number = str(span["version"])
        if span["start"] == span["end"]:
            continue
        if span["start"] != end:
            break
        end = int(span["end"])
        found.append(VersionSpan(int(number) if number.isdigit() else version, int(span["start"]), end))
    return tuple(found) if found and end == tokens else (VersionSpan(version, 0, tokens),)
