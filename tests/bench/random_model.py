"""Checkpoints with the shapes of real models and random weights, for speed and memory."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

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
PATCHES = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "processor_class": "Qwen3VLProcessor"}
PROCESSORS = {
    "preprocessor_config.json": PATCHES | {"image_processor_type": "Qwen2VLImageProcessor"},
    "video_preprocessor_config.json": PATCHES | {"video_processor_type": "Qwen3VLVideoProcessor"},
}


def qwen35_9b() -> Any:
    """The configuration of Qwen3.5-9B with its vision tower, as its checkpoint has it; the sizes are the defaults'."""
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    text = {
        "rope_parameters": rope | {"mrope_interleaved": True, "mrope_section": [11, 11, 10]},
        "tie_word_embeddings": False,
    }
    vision = {"out_hidden_size": 4096}
    return transformers().Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=False)


def text_config(model: str, layers: int | None = None) -> Any:
    """The configuration of Qwen3-4B, or of Qwen3.5-9B without its vision tower, with its first layers alone."""
    auto = transformers()
    config = auto.Qwen3Config(**QWEN3_4B) if model == "qwen3_4b" else auto.Qwen3_5TextConfig()
    if layers is not None:
        config.num_hidden_layers, config.layer_types = layers, config.layer_types[:layers]
    return config


def save_random(folder: Path, config: Any) -> Path:
    """Save a model of this configuration with random weights in bfloat16, and a tokenizer; return the folder."""
    sees = hasattr(config, "vision_config")
    kind = transformers().AutoModelForImageTextToText if sees else transformers().AutoModelForCausalLM
    torch.manual_seed(0)
    with torch.device("meta"):
        model = kind.from_config(config)
    # A card draws 4B numbers in a second, a CPU in a minute.
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    model = model.to(torch.bfloat16).to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.02)
    model.tie_weights()
    tokenizer = build_tokenizer(4096)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if sees:  # SGLang makes the processor of images, also for text alone
        saved = json.loads((folder / "config.json").read_text())
        saved["text_config"]["full_attention_interval"] = 4  # SGLang reads this; transformers saves the layers' types
        (folder / "config.json").write_text(json.dumps(saved))
        for name, processor in PROCESSORS.items():
            (folder / name).write_text(json.dumps(processor))
    return folder


def save_qwen3(folder: Path, *, tokenizer: Any = None, **shapes: Any) -> Path:
    """Save a Qwen3 of these shapes in float32 as transformers initializes it, and a tokenizer; return the folder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = transformers().Qwen3Config(**shapes, dtype="float32")
        transformers().Qwen3ForCausalLM(config).save_pretrained(folder)
    (tokenizer or build_tokenizer(4096)).save_pretrained(folder)
    return folder
