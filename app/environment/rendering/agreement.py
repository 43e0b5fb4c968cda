"""Check that conversations are rendered as transformers renders them, token by token, before anything is sampled."""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from app.environment.protocol import Message
from app.environment.rendering.chat import ANSWER as REPLY
from app.environment.rendering.chat import MADE_UP, ChatRenderer
from app.environment.rendering.reply_parser import CALL, TOOL

SHOWN = 8  # tokens of a difference
SYSTEM: Message = {"role": "system", "content": "Be brief, é."}
QUESTION: Message = {"role": "user", "content": "How much is 1 + 2?\n"}
ANSWER: Message = {"role": "assistant", "content": "It is 3."}
NEXT: Message = {"role": "user", "content": "And 4?"}
CALLING: Message = {"role": "assistant", "content": "I ask.", "tool_calls": [CALL]}
RESULT: Message = {"role": "tool", "content": "3", "name": "add", "tool_call_id": CALL["id"]}

SCRIPT: tuple[tuple[str, tuple[Message, ...], tuple[Message, ...], bool], ...] = (
    # name, up to a reply, what follows it, with tools
    ("a question", (QUESTION, ANSWER), (NEXT,), False),
    ("a question after a system message", (SYSTEM, QUESTION, ANSWER), (NEXT,), False),
    ("a question with tools", (SYSTEM, QUESTION, CALLING), (RESULT, RESULT), True),
)


def first_difference(renderer: ChatRenderer, tokenizer: Any, variables: Mapping[str, Any]) -> str | None:
    """Compare a renderer with transformers on a few conversations; return the difference in words, or None.

    Conversations that the template rejects are not compared: a run with such messages fails and names the message.
    """

    def expected(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> list[int] | None:
        try:
            text = tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=True, **variables
            )
        except Exception:  # the template is a program of the model's
            return None
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    for name, before, after, with_tools in SCRIPT:
        tools = [TOOL] if with_tools else None
        opening, whole = expected(before[:-1], tools), expected([*before, *after], tools)
        if with_tools and (opening is None or whole is None or renderer.tool_syntax is None):
            continue  # the template has no tools

        for messages, reference in ((before[:-1], opening), ((*before, *after), whole)):
            if reference is not None and (found := renderer.opening(messages, tools)) != reference:
                at = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(found, reference, strict=False)))
                ours, theirs = (renderer.tokenizer.decode(ids[at : at + SHOWN]) for ids in (found, reference))
                return f"{name} is rendered with {ours!r} at token {at}, and by transformers with {theirs!r}"

        close, rest = renderer.after_reply(after, tools) if whole is not None else (0, [])
        if whole is not None and whole[-len(rest) - 1 :] != [close, *rest]:
            return f"what follows the reply to {name} depends on what stands before it"
    return None


def other_end(tokenizer: Any, stops: Sequence[int], variables: Mapping[str, Any]) -> str | None:
    """Return the special token with which a chat template ends a reply, if it is not in `stops`; else None.

    A template of single questions ends no reply with a token.
    """
    try:
        text = tokenizer.apply_chat_template([QUESTION, REPLY, NEXT], tokenize=False, **variables)
    except Exception:  # the template is a program of the model's
        return None
    ids = tokenizer(text.partition(MADE_UP)[2], add_special_tokens=False)["input_ids"]
    first = next((token for token in ids if tokenizer.decode([token]).strip()), None)
    added = getattr(tokenizer, "added_tokens_decoder", {}).get(first)
    return added.content if added is not None and added.special and first not in stops else None
