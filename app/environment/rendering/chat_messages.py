"""Messages in the text of a Qwen chat template, for people."""

import re

from app.environment.protocol import Message

START, END = "<|im_start|>", "<|im_end|>"
TOOL_RESULT = re.compile(r"<tool_response>\n?(.*?)\n?</tool_response>", re.DOTALL)
NO_REASONING = re.compile(r"</?think>")


def messages_in(text: str) -> list[Message]:
    r"""Return the messages that a rendered text holds, without the empty one for the next reply.

    >>> messages_in("<|im_end|>\n<|im_start|>user\nMore!<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
    [{'role': 'user', 'content': 'More!'}]
    """
    first, *rendered = text.split(START)
    messages: list[Message] = []
    if beginning := first.replace(END, "").strip():  # of a text that begins within a message
        messages.append({"role": "user", "content": beginning})

    for each in rendered:
        role, _, content = each.partition("\n")
        content = content.partition(END)[0]
        results = TOOL_RESULT.findall(content) if role == "user" else []
        messages += [{"role": "tool", "content": result} for result in results]
        if not results and not (role == "assistant" and not NO_REASONING.sub("", content).strip()):
            messages.append({"role": role, "content": content.strip()})
    return messages
