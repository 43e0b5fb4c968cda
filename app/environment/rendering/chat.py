r"""Conversations by a model's own chat template; its replies are read by the `renderers` package.

What follows a reply is rendered by the template after a made-up reply, from the token on that ends it:

    … <|im_start|>assistant\n MADE UP <|im_end|> │ \n<|im_start|>user\n More! <|im_end|>\n<|im_start|>assistant\n
    sequence as sampled ……………………………… <|im_end|> │ appended

Invariants:
- What `following` returns stands after the sequence token for token; nothing that was sampled is tokenized again.
- A sequence ends where the template would write its history in another way. With the template's thinking mode off, the
  empty think block of each generation prompt is not such a difference: it is what the policy was conditioned on.
- A reply is parsed by token id: markers that are spelled out as text are text.
- Special tokens that a message spells, such as the result of a tool, are text too, see `ControlTokens`.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

from app.environment.protocol import Message, Reply, ToolCall, Tools
from app.environment.rendering import reply_parser
from app.environment.rendering.chat_template import ChatTemplate
from app.environment.rendering.tokenizer_file import TokenizerFile
from app.utils.chat_messages import CLOSE, OPEN, ControlTokens, encode_marked

QUESTION: Message = {"role": "user", "content": "How much is it?"}
MADE_UP = "Here stands a reply."
ANSWER: Message = {"role": "assistant", "content": MADE_UP}
RESULT: Message = {"role": "tool", "content": "3", "name": "add", "tool_call_id": "functions.add:0"}
THOUGHT = "So I thought."
THOUGHTS: tuple[Message, ...] = (  # as a field, and in the text
    {**ANSWER, "reasoning_content": THOUGHT},
    {**ANSWER, "content": f"<think>\n{THOUGHT}\n</think>\n\n{MADE_UP}"},
)
EMPTY_BLOCK = re.compile(r"<think>\s*(</think>\s*|$)")

PROBLEMS = {  # the package's status of a call → that for the policy
    "ok": "ok",
    "invalid_json": "the arguments of the call are not valid JSON",
    "unclosed_block": "the call was not closed",
    "missing_name": "the call has no name",
    "malformed_structure": "the call does not have the form of a tool call",
    "unknown_tool": "there is no such tool",
    "not_an_object": "the arguments of the call are not a JSON object",  # a status of ours
}
UNREADABLE = "the call cannot be read"


class ChatRenderer:
    """Messages by a chat template."""

    def __init__(
        self,
        folder: Path,
        keep_thinking: bool,
        enable_thinking: bool,
        template: str | None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        """Load tokenizer and template. Raises `ValueError` if one cannot be read, or no stop token follows a reply."""
        self.tokenizer = TokenizerFile(folder)
        self._template = ChatTemplate(folder, template, {"enable_thinking": enable_thinking, **(variables or {})})
        added = self.tokenizer.backend.get_added_tokens_decoder()
        self._control = ControlTokens.of(added, self.tokenizer.encode, self.tokenizer.decode)
        self._keep_thinking = keep_thinking
        self._thinking = enable_thinking
        self._histories: dict[tuple[bool, bool], tuple[bool, bool]] = {}
        self.after_reply([QUESTION], None)

    def opening(self, messages: Sequence[Message], tools: Tools | None = None) -> list[int]:
        if tools and self.tool_syntax is None:
            raise ValueError(
                f"the chat template of {self.tokenizer.name_or_path} has no known syntax of tool calls: give a model "
                "that has one, or model.chat_template."
            )
        text = self._template.render(self._control.marked(messages), tools)
        return encode_marked(text, self.tokenizer.encode)

    def following(
        self, token_ids: Sequence[int], messages: Sequence[Message], tools: Tools | None = None
    ) -> list[int] | None:
        if any(message["role"] == "assistant" for message in messages):
            return None
        by_user = any(message["role"] == "user" for message in messages)
        extends, strips = self._history(by_user, bool(tools))
        if not extends:
            return None

        text = self.tokenizer.decode(token_ids)
        reasoned = any(marker in EMPTY_BLOCK.sub("", text) for marker in (OPEN, CLOSE))
        if not self._keep_thinking and ((strips and reasoned) or self._rewrites(text, by_user, tools)):
            return None

        close, appended = self.after_reply(messages, tools)
        if token_ids[-1] == close:
            return appended
        unfinished = self.tokenizer.encode(CLOSE) if text.rfind(OPEN) > text.rfind(CLOSE) else []
        return [*unfinished, close, *appended]

    def _rewrites(self, text: str, by_user: bool, tools: Tools | None) -> bool:
        """Whether the template writes the last reply of a text in another way once messages follow.

        It may leave out reasoning between other markers than <think>, as Gemma 4's does.
        """
        bare = self._template.render([QUESTION], tools, prompt=False)
        generation = EMPTY_BLOCK.sub("", self._template.render([QUESTION], tools).removeprefix(bare))
        reply = EMPTY_BLOCK.sub("", text).rpartition(generation)[2] if generation else ""
        for token in self.tokenizer.stop_ids:
            reply = reply.removesuffix(self.tokenizer.decode([token]))
        sampled: Message = {"role": "assistant", "content": reply}
        return reply.strip() not in self._template.render([QUESTION, sampled, QUESTION if by_user else RESULT], tools)

    def parse(self, token_ids: Sequence[int], prompt_ids: Sequence[int] = (), tools: Tools | None = None) -> Reply:
        sampled = list(token_ids)
        content = sampled[:-1] if sampled and sampled[-1] in self.tokenizer.stop_ids else sampled
        try:
            declared = [dict(tool) for tool in tools] if tools else None
            parsed = self._parse(content, tools=declared, prompt_ids=list(prompt_ids))
        except (ValueError, RecursionError):  # numbers of 5,000 digits, 10,000 brackets
            text = self.tokenizer.decode(sampled, skip_special_tokens=True)
            return Reply(text, "", (ToolCall("", {}, UNREADABLE),), truncated=False, token_ids=tuple(sampled))

        calls = tuple(_tool_call(call, index, tools) for index, call in enumerate(parsed.tool_calls))
        reasoning = (parsed.reasoning_content or "").strip()
        return Reply(parsed.content.strip(), reasoning, calls, truncated=False, token_ids=tuple(sampled))

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids)

    @property
    def tool_syntax(self) -> str | None:
        return self._tool_parser[0] if self._tool_parser else None

    @cached_property
    def _parse(self) -> reply_parser.Parse:
        return self._tool_parser[1] if self._tool_parser else reply_parser.default_parser(self.tokenizer, None)

    @cached_property
    def _tool_parser(self) -> tuple[str, reply_parser.Parse] | None:
        """What reads the template's tool calls; None if it has no place for tools, or writes them in an unknown way."""
        tools = [reply_parser.TOOL]
        calling = {"role": "assistant", "content": "", "tool_calls": [reply_parser.CALL]}
        opening = self._template.render([QUESTION], tools)
        if opening == self._template.render([QUESTION]):
            return None
        try:
            whole = self._template.render([QUESTION, calling], tools, prompt=False)
            answered = self.tokenizer.encode(self._template.render([QUESTION, calling, RESULT], tools))
            close, rest = self.after_reply([RESULT], tools)
        except ValueError:
            return None
        if answered[-len(rest) - 1 :] != [close, *rest]:
            return None

        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(opening, whole, strict=False)))
        call = self.tokenizer.encode(whole[common:])
        end = next((at for at, token in enumerate(call) if token in self.tokenizer.stop_ids), len(call))
        before = self.tokenizer.encode(whole[:common])
        return reply_parser.tool_parser(self.tokenizer, before, call[:end], self._thinking)

    def after_reply(self, messages: Sequence[Message], tools: Tools | None) -> tuple[int, list[int]]:
        """Return the token that ends a reply, and the tokens after it. Raises `ValueError` if the template has none."""
        whole = self._template.render([QUESTION, ANSWER, *self._control.marked(messages)], tools)
        tail = encode_marked(whole.partition(MADE_UP)[2], self.tokenizer.encode)
        end = next((at for at, token in enumerate(tail) if token in self.tokenizer.stop_ids), len(tail))
        between = self.tokenizer.decode(tail[:end]).strip()

        if end == len(tail) or between:
            stops = ", ".join(sorted(self.tokenizer.decode([token]) for token in self.tokenizer.stop_ids))
            found = f"{self.tokenizer.decode(tail[:8])!r}" if tail else "no reply"
            raise ValueError(
                f"model.path={self.tokenizer.name_or_path} is not accepted with an environment and "
                f"data.template=chat: the model ends a reply with {stops or 'no token'} (eos_token_id), and its chat "
                f"template writes {found} after it."
            )
        return tail[end], tail[end + 1 :]

    def _history(self, by_user: bool, with_tools: bool) -> tuple[bool, bool]:
        """Return what messages, one of them the user's or only results of tools, do to the conversation before them.

        Whether the template writes a question and its reply as without them, and whether it leaves out the reasoning.
        """
        if (by_user, with_tools) not in self._histories:
            tools = [reply_parser.TOOL] if with_tools else None
            follows = QUESTION if by_user else RESULT
            opening = EMPTY_BLOCK.sub("", self._template.render([QUESTION], tools))
            whole = EMPTY_BLOCK.sub("", self._template.render([QUESTION, ANSWER, follows], tools))
            strips = not any(THOUGHT in self._template.render([QUESTION, each, follows], tools) for each in THOUGHTS)
            self._histories[by_user, with_tools] = whole.startswith(opening), strips
        return self._histories[by_user, with_tools]


def _tool_call(call: Any, index: int, tools: Tools | None) -> ToolCall:
    status = str(call.status)
    name = call.name or ""
    arguments = call.arguments if call.arguments is not None else {}

    # XML arguments are JSON only where a schema says so
    if status == "invalid_json" and name and tools is None:
        status = "ok"
    if status == "ok" and not isinstance(name, str):
        status = "missing_name"
    elif status == "ok" and not isinstance(arguments, Mapping):
        status = "not_an_object"

    name = name if isinstance(name, str) else ""
    arguments = dict(arguments) if isinstance(arguments, Mapping) else {}
    return ToolCall(name, arguments, PROBLEMS.get(status, UNREADABLE), id=f"call_{index}")
