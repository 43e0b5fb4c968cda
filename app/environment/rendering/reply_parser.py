"""Which parser of the `renderers` package reads the tool calls that a chat template writes.

A parser is chosen by what it does: the template writes a call, and the first parser that reads the same call from its
tokens is taken. So a family needs no entry by name, and a checkpoint with another template gets the parser of that.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from app.environment.rendering.tokenizer_file import TokenizerFile, import_package

TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add numbers, é <b>.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "string", "description": "A sum."}},
            "required": ["a"],
        },
    },
}
ARGUMENTS = {"a": "1 + 2"}
CALL = {"id": "functions.add:0", "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}

RENDERERS = {  # name → module and class, which parse by token id; of the same markers the first that fits is taken
    "qwen3": ("renderers.qwen3", "Qwen3Renderer"),
    "qwen3.5": ("renderers.qwen35", "Qwen35Renderer"),
    "glm-4.5": ("renderers.glm45", "GLM45Renderer"),
    "glm-5": ("renderers.glm5", "GLM5Renderer"),
    "kimi-k2": ("renderers.kimi_k2", "KimiK2Renderer"),
    "deepseek-v3": ("renderers.deepseek_v3", "DeepSeekV3Renderer"),
    "llama-3": ("renderers.llama_3", "Llama3Renderer"),
}
TOOL_PARSERS = ("qwen3", "qwen3.5", "glm", "deepseek-v3")  # of a tokenizer that lacks the family's other markers

OPEN = "<think>"
PROMPT_END = 8  # tokens in which a prompt may open the reasoning

Parse = Callable[..., Any]  # `parse_response` of a renderer: sampled ids, `tools=`, `prompt_ids=` → what they say


def tool_parser(
    tokenizer: TokenizerFile, prompt_ids: Sequence[int], call: Sequence[int], thinking: bool
) -> tuple[str, Parse] | None:
    """Return the name of the syntax in which a template writes tool calls, and its parser; None if none reads them.

    `prompt_ids` are a question with `TOOL`, and `call` the reply to it with `CALL`, as the template writes it.
    """
    for name in RENDERERS:
        parse = _typed(name, tokenizer, thinking)
        if parse is not None and _parses_call(parse, prompt_ids, call):
            return name, parse
    for name in TOOL_PARSERS:
        parse = default_parser(tokenizer, name)
        if _parses_call(parse, prompt_ids, call):
            return name, parse
    return None


def _typed(name: str, tokenizer: TokenizerFile, thinking: bool) -> Parse | None:
    """Return the parser of a family, or None if the tokenizer lacks one of its markers."""
    module, renderer = RENDERERS[name]
    kind = getattr(import_package("renderers.configs"), f"{renderer}Config")
    config = kind(enable_thinking=thinking) if "enable_thinking" in kind.model_fields else kind()
    try:
        parse: Parse = getattr(import_package(module), renderer)(tokenizer, config).parse_response
    except AssertionError:  # how the package reports a missing marker
        return None
    return parse


def default_parser(tokenizer: TokenizerFile, syntax: str | None) -> Parse:
    """Return the parser of text and `<think>` reasoning; with a syntax also of tool calls."""
    config = import_package("renderers.configs").DefaultRendererConfig(tool_parser=syntax)
    renderer = import_package("renderers.default").DefaultRenderer(tokenizer, config)
    opener = tokenizer.encode(OPEN)

    def parse(token_ids: list[int], *, tools: Any, prompt_ids: list[int]) -> Any:
        opened = tokenizer.decode(prompt_ids[-PROMPT_END:]).rstrip().endswith(OPEN)
        return renderer.parse_response([*opener, *token_ids] if opened else token_ids, tools=tools)

    return parse


def _parses_call(parse: Parse, prompt_ids: Sequence[int], call: Sequence[int]) -> bool:
    parsed = parse(list(call), tools=[dict(TOOL)], prompt_ids=list(prompt_ids))
    return [(each.name, each.arguments, str(each.status)) for each in parsed.tool_calls] == [("add", ARGUMENTS, "ok")]
