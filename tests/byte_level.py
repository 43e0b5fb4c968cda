"""A model directory with a byte-level tokenizer: one token a byte, and special tokens."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
R1 = ("<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>")


def write_tokenizer(
    folder: Path, special: Sequence[str] = CHATML, *, model_type: str = "qwen3", **settings: Any
) -> Path:
    """Write tokenizer.json, tokenizer_config.json with `settings`, and a config.json; the last special token ends."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {each: index for index, each in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(folder / "tokenizer.json"))

    declared = {"tokenizer_class": "TokenizersBackend", "bos_token": special[0], "eos_token": special[-1]} | settings
    declared = {name: value for name, value in declared.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(declared), encoding="utf-8")
    config = {"model_type": model_type, "architectures": ["X"], "eos_token_id": tokenizer.token_to_id(special[-1])}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
