"""Messages as token ids and back, in an environment's worker process: one renderer per family of chat templates.

    strand     ┌── opening ──┐┌─ reply 1 ─┐┌─ following ─┐┌─ reply 2 ─┐
               prompt tokens   sampled      not sampled    sampled

Invariants:
- Sampled tokens are never tokenized again: `following` returns tokens to append, or None where the template would
  rewrite what stands in the strand, and then a new strand begins.
- Importing this package imports the standard library only; no renderer imports torch or transformers.
"""

import json
from functools import lru_cache
from pathlib import Path

from app.environment.rendering.base import Renderer, Tools

__all__ = ["FAMILIES", "PLAIN", "RENDERERS", "Renderer", "Tools", "family_of", "renderer_for"]

PLAIN = "plain"
FAMILIES = {  # `model_type` of a config.json → renderer
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "qwen3_5": "qwen3.5",
    "qwen3_5_text": "qwen3.5",
    "qwen3_5_moe": "qwen3.5",
    "qwen3_5_moe_text": "qwen3.5",
}
RENDERERS = (PLAIN, *dict.fromkeys(FAMILIES.values()))
THINKING = ("template", "keep")


@lru_cache(maxsize=4)
def renderer_for(name: str, model_path: str, thinking: str = "template", enable_thinking: bool = False) -> Renderer:
    """Load the renderer `name` with the tokenizer of a model directory. The same arguments give the same object.

    Args:
        name: One of `RENDERERS`.
        model_path: Directory with `tokenizer.json`.
        thinking: Earlier reasoning at a new user message: "template" does as the template does, "keep" keeps it.
        enable_thinking: The template's argument, which is `data.thinking`.

    Raises:
        ValueError: One sentence: an unknown name, no tokenizer, a missing package, or a model with another template.
    """
    if name not in RENDERERS:
        raise ValueError(f"there is no renderer {name}: give one of {', '.join(RENDERERS)}.")
    if thinking not in THINKING:
        raise ValueError(f"environment.thinking={thinking} is not accepted: give {' or '.join(THINKING)}.")

    if name == PLAIN:
        from app.environment.rendering.plain import PlainRenderer

        return PlainRenderer(Path(model_path))

    from app.environment.rendering.chat import ChatRenderer

    return ChatRenderer(name, Path(model_path), thinking == "keep", enable_thinking)


def family_of(model_path: Path, chat_template: bool) -> str:
    """Return the name of a model's renderer.

    Args:
        model_path: Hugging Face model directory.
        chat_template: Whether the data uses the tokenizer's chat template (`data.template=chat`).

    Raises:
        ValueError: One sentence that names the model and its family, which has no renderer.
    """
    if not chat_template:
        return PLAIN

    config = model_path / "config.json"
    try:
        model_type = json.loads(config.read_text()).get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"model.path={model_path} is not accepted: its config.json cannot be read.") from error

    if model_type not in FAMILIES:
        raise ValueError(
            f"model.path={model_path} is not accepted with an environment and data.template=chat: "
            f"the family {model_type} has no renderer; give a model of {', '.join(FAMILIES)}, or data.template=plain."
        )
    return FAMILIES[model_type]
