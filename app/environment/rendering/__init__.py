"""Messages as token ids and back, in an environment's worker process: by the model's chat template, or as plain text.

    sequence     ┌── opening ──┐┌─ reply 1 ─┐┌─ following ─┐┌─ reply 2 ─┐
               prompt tokens   sampled      not sampled    sampled

Invariants:
- Sampled tokens are never tokenized again: `following` returns tokens to append, or None where the template would
  rewrite what stands in the sequence, and then a new sequence begins.
- Importing this package imports the standard library only; no renderer imports torch or transformers.
"""

import json
from functools import lru_cache
from pathlib import Path

from app.environment.protocol import Renderer

PLAIN, CHAT = "plain", "chat"


@lru_cache(maxsize=4)
def renderer_for(
    name: str,
    model_path: str,
    thinking: str = "template",
    enable_thinking: bool = False,
    template: str | None = None,
    variables: str = "{}",
) -> Renderer:
    """Load the renderer `name` with the tokenizer of a model directory. The same arguments give the same object.

    Args:
        name: `PLAIN` or `CHAT`.
        model_path: Directory with `tokenizer.json`.
        thinking: Earlier reasoning at a new user message: "template" does as the template does, "keep" keeps it.
        enable_thinking: The template's argument, which is `data.thinking`.
        template: Text of a chat template in place of the model's own.
        variables: Further arguments of the template, as JSON text.

    Raises:
        ValueError: One sentence: no tokenizer, a missing package, or an unusable template.
    """
    if name == PLAIN:
        from app.environment.rendering.plain import PlainRenderer

        return PlainRenderer(Path(model_path))

    from app.environment.rendering.chat import ChatRenderer

    return ChatRenderer(Path(model_path), thinking == "keep", enable_thinking, template, json.loads(variables))
