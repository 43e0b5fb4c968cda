"""The tiny model's tokenizer: one token per character of printable ASCII and newline, with Qwen's chat markers.

Always holds: any English text round-trips (`decode(encode(text)) == text`); a character outside the set becomes the
unknown token; no token is added that the text or the chat template did not ask for.
"""

from typing import Any

from app.model.hf_import import transformers

PAD, START, END, UNKNOWN = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unknown|>"
SPECIAL = (PAD, START, END, UNKNOWN)
CHARACTERS = ("\n", *map(chr, range(32, 127)))
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def tokenizer(max_tokens: int) -> Any:
    """A `PreTrainedTokenizerFast` of 100 tokens for a model of `max_tokens` positions."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *CHARACTERS))}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    inner.decoder = decoders.Fuse()
    outer = transformers().PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[START],
        model_max_length=max_tokens,
        clean_up_tokenization_spaces=False,
    )
    outer.chat_template = CHAT_TEMPLATE
    return outer
