"""Checkpoints with the shapes of real models and random weights, for speed and memory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from app.model.hf_import import transformers
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


def save_random_qwen3(folder: Path, shapes: Mapping[str, Any]) -> Path:
    """Save a Qwen3 of these shapes in bfloat16, and a tokenizer; return the folder."""
    config = transformers().Qwen3Config(**shapes, dtype="bfloat16")
    torch.manual_seed(0)
    with torch.device("meta"):
        model = transformers().Qwen3ForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.02)
    model.tie_weights()
    model.save_pretrained(folder)
    build_tokenizer(4096).save_pretrained(folder)
    return folder
