"""Check that a model's own Jinja chat template says what its renderer says, before anything is sampled.

A family's name is not enough: checkpoints of one `model_type` may ship different templates.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from app.environment.protocol import Message
from app.environment.rendering.tokenizer_file import TokenizerFile, import_package, read_json

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add numbers, é <b>.",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
    },
}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": "1 + 2"}}}
QUESTION = {"role": "user", "content": "How much is it?"}
THOUGHT = {"role": "assistant", "reasoning_content": "I think.", "content": "It is 3."}
CALLING = {"role": "assistant", "content": "I ask.", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "3"}
QUESTIONS: tuple[tuple[str, tuple[Message, ...], bool], ...] = (  # name, conversation, with tools
    ("a question", (QUESTION,), False),
    ("a question with tools", ({"role": "system", "content": "Be brief."}, QUESTION), True),
)
HISTORIES: tuple[tuple[str, tuple[Message, ...], bool], ...] = (
    ("a question after an answer", (QUESTION, THOUGHT, QUESTION), False),
    ("results of tools", (QUESTION, CALLING, RESULT, RESULT), True),
)

Rendering = Callable[[Sequence[Message], Sequence[Mapping[str, Any]] | None, bool], list[int]]
"""Conversation, tools, thinking mode → tokens up to where the policy speaks."""


def thinking_of(rendering: Rendering, name: str, tokenizer: TokenizerFile, enable_thinking: bool) -> bool:
    r"""Compare a renderer with the template of the model directory, if there is one, on four conversations.

    Questions are compared by tokens. Histories are compared by text, since the renderer cuts an assistant's text before
    a tool call by itself (".", "\n\n" for ".\n\n"), and with the thinking mode on: off, it keeps empty think blocks.

    Args:
        rendering: The renderer.
        name: Its name.
        tokenizer: The model's tokenizer.
        enable_thinking: The argument that the driver gives to the template.

    Returns:
        The renderer's thinking mode that agrees with the template under `enable_thinking`. A template that knows no
        thinking mode ignores the argument.

    Raises:
        ValueError: One sentence that names the conversation on which they differ.
    """
    source = template_of(Path(tokenizer.name_or_path))
    if source is None:
        return enable_thinking

    def agree(probe: tuple[str, tuple[Message, ...], bool], asked: bool, rendered: bool) -> bool:
        _, messages, with_tools = probe
        tools = [TOOL] if with_tools else None
        text = render_template(source, messages, tools, asked)
        found = rendering(messages, tools, rendered)
        # what an assistant said may be cut into other tokens of the same text
        return tokenizer.decode(found) == text if probe in HISTORIES else found == tokenizer.encode(text)

    mode = enable_thinking
    if not agree(QUESTIONS[0], enable_thinking, mode):
        mode = not enable_thinking
    differing = [probe[0] for probe in QUESTIONS if not agree(probe, enable_thinking, mode)]
    differing += [probe[0] for probe in HISTORIES if not agree(probe, True, True)]

    if differing:
        raise ValueError(
            f"model.path={tokenizer.name_or_path} is not accepted with an environment and data.template=chat: "
            f"its chat template differs from that of {name} for {differing[0]}; give a model with the family's "
            f"template, or data.template=plain."
        )
    return mode


def template_of(folder: Path) -> str | None:
    """Return the text of a model directory's chat template, or None."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")

    found = read_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):  # named templates
        found = next((entry["template"] for entry in found if entry.get("name") == "default"), None)
    return found if isinstance(found, str) else None


def render_template(
    source: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, enable_thinking: bool
) -> str:
    """Return a conversation by a Jinja template, up to where the policy speaks, as transformers renders it.

    Raises:
        ValueError: The template is invalid or rejects the messages.
    """
    sandbox = import_package("jinja2.sandbox")
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _reject

    try:
        template = environment.from_string(source)
        text: str = template.render(
            messages=list(messages), tools=tools, add_generation_prompt=True, enable_thinking=enable_thinking
        )
    except import_package("jinja2").TemplateError as error:
        raise ValueError(f"the chat template cannot be used ({error}).") from error
    return text


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _reject(message: str) -> NoReturn:
    raise import_package("jinja2").TemplateError(message)
