"""Model directories with Qwen's markers and templates, and a small vocabulary of byte pairs.

The templates in `templates/` are those of the checkpoints (Qwen3-8B, Qwen3.5-9B, Qwen3.5-0.8B; Apache-2.0), in the
copies that TRL 1.16.0 ships as `trl/chat_templates/{qwen3,qwen3_5_think,qwen3_5_nothink}.jinja`.
"""

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from app.environment.protocol import Renderer

TEMPLATES = Path(__file__).parent / "templates"
TEMPLATE = {"qwen3": "qwen3.jinja", "qwen3.5": "qwen3_5_think.jinja"}
MODEL_TYPE = {"qwen3": "qwen3", "qwen3.5": "qwen3_5"}

FOLDER = tempfile.TemporaryDirectory(prefix="model-")  # removed when the process ends

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
SPECIAL_PADS = ("<|image_pad|>", "<|video_pad|>")
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")  # not special
PATTERN = (  # Qwen's pre-tokenizer
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@cache
def tokenizer() -> Any:
    """A byte-level BPE whose merges span newlines and punctuation, as Qwen's do; trained on the templates' own text."""
    from tokenizers import AddedToken, normalizers

    texts = [path.read_text() for path in sorted(TEMPLATES.glob("*.jinja"))]
    backend = byte_pairs([*texts, "assistant\n user\n system\n .\n\n .\n !\n\n\n \n\n"], 1200, normalizers.NFC())
    backend.add_special_tokens([AddedToken(token, special=True) for token in (*SPECIAL, *SPECIAL_PADS)])
    backend.add_tokens([AddedToken(token, special=False) for token in MARKERS])
    return backend


def byte_pairs(texts: Sequence[str], size: int, normalizer: Any = None) -> Any:
    """A byte-level BPE with Qwen's pre-tokenizer, trained on these texts."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    if normalizer is not None:
        backend.normalizer = normalizer
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([*texts] * 3, trainer)
    return backend


def ids(text: str) -> list[int]:
    """The tokens of a text [N], none of them added."""
    found: list[int] = tokenizer().encode(text, add_special_tokens=False).ids
    return found


def decoded(token_ids: Iterable[int]) -> str:
    """The text of tokens, the special ones included."""
    return str(tokenizer().decode(list(token_ids), skip_special_tokens=False))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def write_model(folder: Path, name: str) -> Path:
    """Write the files of a model directory that rendering reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer().save(str(folder / "tokenizer.json"))
    config = {"model_type": MODEL_TYPE[name], "eos_token_id": tokenizer().token_to_id("<|im_end|>")}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text((TEMPLATES / TEMPLATE[name]).read_text())
    return folder


def by_transformers(folder: Path, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> list[int]:
    """The reference: the template as transformers renders it with the thinking mode on, with the generation prompt."""
    from transformers import PreTrainedTokenizerFast

    template = (folder / "chat_template.jinja").read_text()
    reference = PreTrainedTokenizerFast(tokenizer_object=tokenizer(), chat_template=template)
    found: list[int] = reference.apply_chat_template(
        [dict(each) for each in messages],
        tools=tools,
        add_generation_prompt=True,
        enable_thinking=True,
        return_dict=False,
    )
    return found


def followed(renderer: Renderer, sequence: Sequence[int], messages: Any, tools: Any = None) -> list[int]:
    """The tokens that a renderer appends to a sequence that goes on."""
    appended = renderer.following(sequence, messages, tools)
    assert appended is not None
    return appended


@cache
def chat_choice() -> dict[str, str]:
    """What `renderer_for` takes for a model whose template has tools."""
    return {"name": "chat", "model_path": str(write_model(Path(FOLDER.name), "qwen3"))}
