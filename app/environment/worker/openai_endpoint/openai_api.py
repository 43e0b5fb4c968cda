"""Requests of OpenAI's and vLLM's clients, and the answers that they read."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from app.environment.protocol import Message, Reply, Sampled, Tool
from app.environment.worker.sequences import message_key
from app.utils.chat_messages import WrongMessages, normalized

MODEL = "policy"
RUN_KEYS = (  # keys of a request that the run decides
    *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
STATUS = ("status_code", "status", "code")  # where openai and httpx, aiohttp, urllib keep it
MAX_CHAIN = 20  # of errors
STREAM = {"stream": "is not supported: a reply is sent as a whole."}
STOP = {"stop": "is not supported: a reply ends where the policy ends it, or at max_completion_tokens."}
UNSUPPORTED = {  # keys of chat/completions that must not be set
    **STREAM,
    **STOP,
    "logprobs": "are not supported here: POST token ids to /inference/v1/generate.",
    "functions": "are not supported: give them as tools.",
}
KEPT = ("content", "reasoning_content", "tool_call_id", "tool_calls")  # beside the role


class Refusal(Exception):
    """A request that is not served: one sentence, in OpenAI's shape."""

    def __init__(self, text: str, status: int = HTTPStatus.BAD_REQUEST, code: str | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.body = {"error": {"message": text, "type": "invalid_request_error", "param": None, "code": code}}


def is_bad_request(error: BaseException) -> bool:
    """Whether an agent's error, or one that led to it, is a client's for HTTP 400, the status of a limit."""
    for _ in range(MAX_CHAIN):
        found = (getattr(each, name, None) for each in (error, getattr(error, "response", None)) for name in STATUS)
        if HTTPStatus.BAD_REQUEST in found:
            return True
        error = error.__cause__ or error.__context__ or error
    return False


def read_json(body: bytes) -> dict[str, Any]:
    """The object that a request's body is."""
    try:
        values = json.loads(body)
    except (ValueError, RecursionError):
        raise Refusal("The body is not JSON.") from None
    if not isinstance(values, dict):
        raise Refusal("The body is not a JSON object.")
    return values


def ignored_keys(values: Mapping[str, Any]) -> list[str]:
    """The keys of a request, or of its `sampling_params`, that have no effect."""
    return [key for key in RUN_KEYS if values.get(key) is not None]


def read_chat(
    body: Mapping[str, Any], replies_sent: Mapping[str, Sequence[Message]]
) -> tuple[list[Message], list[Tool] | None, int | None]:
    """Read a request to `chat/completions`: messages as the policy takes them, tools, and the limit of tokens.

    `replies_sent` are the policy's replies, by `message_key` of what the agent was sent for them. An agent may send
    them back without the reasoning, or with null fields. Raises `Refusal` for what is not served.
    """
    _refuse_chat(body)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refusal("messages must be a list of at least one message.")

    read = read_messages(messages)
    keys = [message_key(message) for message in read]
    for place, key in enumerate(keys):
        if replies := replies_sent.get(key):
            # of the replies with this text, the one with this reasoning, else by its place among the latest ones
            reasoning = read[place].get("reasoning_content")
            same = [each for each in replies if reasoning and each.get("reasoning_content") == reasoning]
            left = keys[place:].count(key)
            read[place] = same[-1] if same else replies[max(0, len(replies) - left)]
    return read, body.get("tools") or None, max_tokens_of(body)


def chat_message(reply: Reply, number: int) -> dict[str, Any]:
    """A reply as an agent is sent it, as the `number`-th of the episode. Calls that could not be read are left out."""
    readable = [call for call in reply.tool_calls if call.ok]
    # ids are unique in the episode, as agents expect
    calls = tuple(replace(call, id=f"call_{number}_{index}") for index, call in enumerate(readable))
    message = replace(reply, tool_calls=calls).message
    for call in message.get("tool_calls", ()):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return message


def chat_answer(message: Mapping[str, Any], reply: Reply, model: object) -> dict[str, Any]:
    """The answer to `chat/completions`."""
    finish = "tool_calls" if "tool_calls" in message else "stop"
    return {
        "id": "chatcmpl-policy",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model if isinstance(model, str) else MODEL,
        "choices": [
            {"index": 0, "message": message, "finish_reason": "length" if reply.truncated else finish, "logprobs": None}
        ],
        "usage": {
            "prompt_tokens": reply.prompt_tokens,
            "completion_tokens": len(reply.token_ids),
            "total_tokens": reply.prompt_tokens + len(reply.token_ids),
        },
    }


def read_generate(body: Mapping[str, Any]) -> tuple[list[int], int | None]:
    """Read token ids [L] and the limit of tokens from vLLM's `generate`. Raises `Refusal` for what is not served."""
    if body.get("features") or body.get("content_parts"):
        raise Refusal("Images, audio and video are not supported: the policy reads text only.")
    _refuse(body, STREAM)

    sampling = body.get("sampling_params") or {}
    token_ids = body.get("token_ids")
    if not isinstance(sampling, dict):
        raise Refusal("sampling_params must be an object.")
    are_tokens = isinstance(token_ids, list) and all(type(each) is int and each >= 0 for each in token_ids)
    if not token_ids or not are_tokens:
        raise Refusal("token_ids must be a list of at least one token id.")

    _refuse(sampling, STOP)
    return token_ids, max_tokens_of(sampling)


def generate_answer(sampled: Sampled) -> dict[str, Any]:
    """The answer to vLLM's `generate`."""
    content = [
        {"token": f"token_id:{token}", "logprob": logprob}
        for token, logprob in zip(sampled.token_ids, sampled.logprobs or (), strict=True)
    ]
    choice = {
        "index": 0,
        "token_ids": list(sampled.token_ids),
        "logprobs": {"content": content},
        "finish_reason": sampled.finish,
    }
    return {"request_id": "generate-policy", "choices": [choice]}


def models_response() -> dict[str, Any]:
    """The answer to `models`."""
    return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "run"}]}


def max_tokens_of(values: Mapping[str, Any]) -> int | None:
    """`max_completion_tokens`, or its old name `max_tokens`."""
    for name in ("max_completion_tokens", "max_tokens"):
        value = values.get(name)
        if value is None:
            continue
        if type(value) is not int or value < 1:
            raise Refusal(f"{name} must be a whole number of at least 1.")
        return value
    return None


def _refuse(values: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Raise `Refusal` for the first of these keys that is set."""
    for key, reason in reasons.items():
        if values.get(key):
            raise Refusal(f"{key} {reason}")
    if values.get("n") not in (None, 1):
        raise Refusal("n must be 1: send a request for each reply.")


def _refuse_chat(body: Mapping[str, Any]) -> None:
    _refuse(body, UNSUPPORTED)
    if body.get("tool_choice") not in (None, "auto"):
        raise Refusal("tool_choice must be auto: the policy decides by itself whether to call a tool.")

    form = body.get("response_format")
    if form is not None and (not isinstance(form, dict) or form.get("type") != "text"):
        raise Refusal("response_format must be text: the policy samples without constraints.")
    tools = body.get("tools")
    for tool in (tools if isinstance(tools, list) else [None]) if tools else ():
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Refusal('tools must be a list of {"type": "function", "function": {"name": ...}}.')


def read_messages(messages: Sequence[Any]) -> list[Message]:
    """Return messages as the policy takes them, without the fields that it does not read."""
    try:
        read = normalized(messages)
    except WrongMessages as error:
        raise Refusal(f"Give {error}.") from None
    roles = ("system" if each["role"] == "developer" else each["role"] for each in read)
    kept = ({name: each[name] for name in KEPT if name in each} for each in read)
    return [{"role": role, **fields} for role, fields in zip(roles, kept, strict=True)]
