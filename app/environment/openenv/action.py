"""The action in a policy's reply."""

import json
from collections.abc import Mapping
from typing import Any

from app.environment.protocol import Reply
from app.environment.tool_schema import checked


class ActionError(Exception):
    """The reply is no action, or the server refuses it. The message is for the policy."""


def read_action(reply: Reply, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the action in a reply.

    Raises:
        ActionError: There is none that fits the schema.
    """
    if len(reply.tool_calls) > 1:
        raise ActionError("there were several calls; act once")
    if reply.tool_calls:
        (call,) = reply.tool_calls
        if not call.ok:
            raise ActionError(call.status)
        action: object = dict(call.arguments)
    else:
        try:
            action = json.loads(_unfenced(reply.text))
        except (ValueError, RecursionError):
            raise ActionError("the reply is not a JSON object") from None
    if not isinstance(action, dict):
        raise ActionError("the reply is not a JSON object")

    known = action
    if schema.get("additionalProperties") is not False:
        known = {name: value for name, value in action.items() if name in schema["properties"]}
    try:
        return {**action, **checked({"function": {"parameters": schema}}, known)}
    except ValueError as error:
        raise ActionError(str(error)) from error


def _unfenced(text: str) -> str:
    """The text in a Markdown fence, if it is in one."""
    text = text.strip()
    if text.startswith("```") and text.endswith("```"):
        return text.removesuffix("```").partition("\n")[2]
    return text
