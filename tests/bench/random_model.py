"""Checkpoints with the shapes of real models and random weights, for speed and memory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from app.device.torchvision_shim import transformers
from tests.tiny_models.tokenizer import build_tokenizer

QWEN3_06B: Mapping[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
QWEN3_4B: Mapping[str, Any] = {
    **QWEN3_06B,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "max_position_embeddings": 40960,
}
VOCABULARY, EOS = 64, 1  # of the model of the comparison with TRL


def save_random_qwen3(folder: Path, shapes: Mapping[str, Any]) -> Path:
    """Save a Qwen3 of these shapes in bfloat16, and a tokenizer; return the folder."""
    config = transformers().Qwen3Config(**shapes, dtype="bfloat16")
    torch.manual_seed(0)
    with torch.device("meta"):
        model = transformers().Qwen3ForCausalLM(config)
    # A GPU draws 4B numbers in a second, a CPU in a minute.
    model = model.to(torch.bfloat16).to_empty(device="cuda" if torch.cuda.is_available() else "cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.02)
    model.tie_weights()
    model.save_pretrained(folder)
    build_tokenizer(4096).save_pretrained(folder)
    return folder


def save_qwen3(folder: Path, *, tokenizer: Any = None, **shapes: Any) -> Path:
    """Save a Qwen3 of these shapes in float32 as transformers initializes it, and a tokenizer; return the folder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = transformers().Qwen3Config(**shapes, dtype="float32")
        transformers().Qwen3ForCausalLM(config).save_pretrained(folder)
    (tokenizer or build_tokenizer(4096)).save_pretrained(folder)
    return folder


def save_baseline_model(folder: Path) -> Path:
    """Save a Qwen3 (6 layers, 256 wide) and a tokenizer with the words `w2` … `w63`; return the folder.

    All tokens are about equally likely, and one of them ends the completion. So completions end by chance, after 64
    tokens on average, with a long tail as in real runs.
    """
    vocabulary = {"<pad>": 0, "<eos>": EOS, **{f"w{index}": index for index in range(2, VOCABULARY)}}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers().PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    return save_qwen3(
        folder,
        tokenizer=tokenizer,
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=EOS,
        bos_token_id=None,
    )
