"""Tokenizer of the tiny model: one token per character of printable ASCII and newline, with Qwen's chat markers.

Invariants:
- English text round-trips: `decode(encode(text)) == text`.
- A character outside the set becomes the unknown token.
- Encoding adds no special tokens.
"""

from typing import Any

from app.device.torchvision_shim import transformers

PAD = "<|endoftext|>"
START = "<|im_start|>"
END = "<|im_end|>"
UNKNOWN = "<|unknown|>"
SPECIAL = (PAD, START, END, UNKNOWN)
CHARACTERS = ("\n", *map(chr, range(32, 127)))
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def build_tokenizer(max_tokens: int) -> Any:
    """Build a `PreTrainedTokenizerFast` with 100 tokens for a model of `max_tokens` positions."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *CHARACTERS))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()

    tokenizer = transformers().PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[START],
        model_max_length=max_tokens,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
