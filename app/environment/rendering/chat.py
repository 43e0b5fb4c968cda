"""Chat templates of the Qwen families, by the `renderers` package.

Invariants:
- What `following` returns stands after the strand token for token; the package's own extension of a strand is taken
  only if it begins with the whole strand.
- A reply is parsed by token id: markers that are spelled out as text are text.
- With the template's thinking mode off, the empty think block of each generation prompt stays in the history, where
  the Jinja template would strip it at the next user message: it is what the policy was conditioned on.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.environment.protocol import Message, Reply, ToolCall
from app.environment.rendering.base import Tools
from app.environment.rendering.chat_messages import messages_in
from app.environment.rendering.chat_template import thinking_of
from app.environment.rendering.tokenizer_file import TokenizerFile, import_package

CLASSES = {  # name → module, renderer, its configuration
    "qwen3": ("renderers.qwen3", "Qwen3Renderer", "Qwen3RendererConfig"),
    "qwen3.5": ("renderers.qwen35", "Qwen35Renderer", "Qwen35RendererConfig"),
}
OK = "ok"
PROBLEMS = {  # the package's status of a call → what the policy is told
    "invalid_json": "the arguments of the call are not valid JSON",
    "unclosed_block": "the call was not closed",
    "missing_name": "the call has no name",
    "malformed_structure": "the call does not have the form of a tool call",
    "unknown_tool": "there is no such tool",
}
UNREADABLE = "the call cannot be read"
NOT_AN_OBJECT = "the arguments of the call are not a JSON object"


class ChatRenderer:
    """Messages by a Qwen chat template.

    Attributes:
        thinking_mode: `enable_thinking` of the `renderers` package that agrees with the model's own template.
    """

    def __init__(self, name: str, folder: Path, keep_thinking: bool, enable_thinking: bool) -> None:
        """Load the tokenizer and check that the model's own template agrees.

        Raises:
            ValueError: The tokenizer lacks a marker, `renderers` is missing, or the model has another template.
        """
        self._name = name
        self._tokenizer = TokenizerFile(folder)
        modes = {mode: self._create(mode, None) for mode in (False, True)}

        def rendering(messages: Sequence[Message], tools: Tools | None, mode: bool) -> list[int]:
            return _opening(modes[mode], messages, tools)

        mode = thinking_of(rendering, name, self._tokenizer, enable_thinking)
        self.thinking_mode = mode
        self._by_template = modes[mode]
        self._keeping = self._create(mode, "all")
        self._keep_thinking = keep_thinking

        markers = ("<|im_start|>", "<think>", "</think>")
        self._start, *self._think = (self._tokenizer.convert_tokens_to_ids(marker) for marker in markers)

    def _create(self, enable_thinking: bool, retention: str | None) -> Any:
        module, renderer, config = CLASSES[self._name]
        settings = getattr(import_package("renderers.configs"), config)(
            enable_thinking=enable_thinking, thinking_retention=retention
        )
        try:
            return getattr(import_package(module), renderer)(self._tokenizer, settings)
        except AssertionError as error:  # how the package reports a missing marker
            folder = self._tokenizer.name_or_path
            raise ValueError(
                f"{folder} has not the tokenizer of {self._name} ({str(error).rstrip('.')}); "
                "give a chat model, or data.template=plain."
            ) from error

    def opening(self, messages: Sequence[Message], tools: Tools | None = None) -> list[int]:
        """Return the conversation by the template, up to where the policy speaks."""
        return _opening(self._by_template, messages, tools)

    def following(
        self, token_ids: Sequence[int], messages: Sequence[Message], tools: Tools | None = None
    ) -> list[int] | None:
        """Return the tokens after a strand, or None where the template would rewrite it."""
        strand = list(token_ids)
        if self._start not in strand:
            return None

        # the last generation prompt and the reply after it
        cut = len(strand) - 1 - strand[::-1].index(self._start)
        nothing_to_strip = not any(marker in strand for marker in self._think)
        renderer = self._keeping if self._keep_thinking or nothing_to_strip else self._by_template
        extended = renderer.bridge_to_next_turn(
            strand[:cut], strand[cut:], [dict(message) for message in messages], tools=_dicts(tools)
        )

        if extended is None or extended.token_ids[: len(strand)] != strand:
            return None
        appended: list[int] = extended.token_ids[len(strand) :]
        return appended

    def parse(self, token_ids: Sequence[int], prompt_ids: Sequence[int] = (), tools: Tools | None = None) -> Reply:
        """Return text, reasoning and tool calls of a reply; problems of a call stand in its status."""
        sampled = list(token_ids)
        try:
            parsed = self._by_template.parse_response(sampled, tools=_dicts(tools), prompt_ids=list(prompt_ids))
        except (ValueError, RecursionError):  # numbers of 5,000 digits, 10,000 brackets
            text = self._tokenizer.decode(sampled, skip_special_tokens=True)
            return Reply(text, "", (ToolCall("", {}, UNREADABLE),), truncated=False, token_ids=tuple(sampled))

        calls = tuple(_tool_call(call, index, tools) for index, call in enumerate(parsed.tool_calls))
        reasoning = (parsed.reasoning_content or "").strip()
        return Reply(parsed.content, reasoning, calls, truncated=False, token_ids=tuple(sampled))

    def read(self, token_ids: Sequence[int]) -> list[Message]:
        """Return the messages between the template's markers; a tool's result has the role `tool`."""
        return messages_in(self._tokenizer.decode(token_ids))

    def shorten(self, text: str, max_tokens: int) -> str:
        return self._tokenizer.shorten(text, max_tokens)


def _opening(renderer: Any, messages: Sequence[Message], tools: Tools | None) -> list[int]:
    rendered: list[int] = renderer.render_ids(
        [dict(message) for message in messages], tools=_dicts(tools), add_generation_prompt=True
    )
    return rendered


def _dicts(tools: Tools | None) -> list[dict[str, Any]] | None:
    return [dict(tool) for tool in tools] if tools else None


def _tool_call(call: Any, index: int, tools: Tools | None) -> ToolCall:
    status = str(call.status)
    name = call.name or ""
    arguments = call.arguments if call.arguments is not None else {}

    # XML arguments are JSON only where a schema says so
    if status == "invalid_json" and name and tools is None:
        status = OK

    if status == OK and not isinstance(name, str):
        status = "missing_name"
    problem = OK if status == OK else PROBLEMS.get(status, UNREADABLE)
    if problem == OK and not isinstance(arguments, Mapping):
        problem = NOT_AN_OBJECT

    return ToolCall(
        name if isinstance(name, str) else "",
        dict(arguments) if isinstance(arguments, Mapping) else {},
        problem,
        id=f"call_{index}",
    )
