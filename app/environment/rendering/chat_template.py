"""A model's own Jinja chat template, as transformers renders it, without transformers."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from app.environment.protocol import Message
from app.environment.rendering.tokenizer_file import import_package, read_json, token_text
from app.utils.chat_messages import for_template

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """A compiled template with the variables that transformers gives to it."""

    def __init__(self, folder: Path, source: str | None, variables: Mapping[str, Any]) -> None:
        """Compile the template `source`, or the model's own. Raises `ValueError` without a valid one."""
        source = template_of(folder) if source is None else source
        if source is None:
            raise ValueError(f"{folder} has no chat template: give model.chat_template, or data.template=plain.")
        try:
            self._template = _environment().from_string(source)
        except import_package("jinja2").TemplateError as error:
            raise ValueError(f"the chat template is not valid Jinja ({error}).") from error

        declared = {**read_json(folder / "special_tokens_map.json"), **read_json(folder / "tokenizer_config.json")}
        tokens = {name: token_text(declared.get(name)) for name in SPECIAL_TOKENS}
        self._variables: dict[str, Any] = {name: token for name, token in tokens.items() if token is not None}
        self._variables |= variables

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, *, prompt: bool = True
    ) -> str:
        """Return a conversation as text, up to a reply with `prompt`. Raises `ValueError` if it is rejected."""
        try:
            text: str = self._template.render(
                messages=for_template(messages), tools=tools or None, add_generation_prompt=prompt, **self._variables
            )
        except Exception as error:  # the template is a program of the model's
            raise ValueError(f"the chat template cannot be used ({error}).") from error
        return text


def template_of(folder: Path) -> str | None:
    """Return the text of a model directory's chat template, or None."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")

    found = read_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):  # named templates
        found = next((entry["template"] for entry in found if entry.get("name") == "default"), None)
    return found if isinstance(found, str) else None


def _environment() -> Any:
    """Return a Jinja environment with what transformers adds to it."""
    jinja2, sandbox = import_package("jinja2"), import_package("jinja2.sandbox")

    class Generation(import_package("jinja2.ext").Extension):  # type: ignore[misc]
        """`{% generation %}` marks replies for training elsewhere; its body is rendered."""

        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(line)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )

    def reject(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def to_json(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        options = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = reject
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
