"""Make the tiny models of `app/model/tiny`: small enough that RL improves them visibly within a minute on a CPU.

    python -m tests.tiny_models.make [NAME …] [--seed N] [--out FOLDER]

Without arguments, writes all committed models again. `tiny` is a Qwen3 with a character tokenizer (ten seconds on one
core), `tiny_qwen35` a Qwen3.5 (a minute), `tiny_tools` a Qwen3 that can ask a calculator (half a minute). All are
ordinary Hugging Face directories. The same seed gives the same bytes on the same machine.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.config.data import GeneratedConfig
from app.config.model import TINY_MODELS
from app.data.rows import generated
from app.device.torchvision_shim import transformers
from tests.tiny_models.tokenizer import build_tokenizer

MAX_POSITIONS = 4096  # tokens
FULL_ATTENTION_INTERVAL = 2  # Qwen3.5 only: layers 1, 3, … have full attention


@dataclass(frozen=True, slots=True)
class Recipe:
    """Shapes of a model, and what its warm-up teaches: sums, or to ask a calculator now and then."""

    qwen35: bool = False
    tools: bool = False
    layers: int = 2
    hidden: int = 64
    heads: int = 4


RECIPES = {"tiny": Recipe(), "tiny_qwen35": Recipe(qwen35=True), "tiny_tools": Recipe(tools=True)}


def make(recipe: Recipe, folder: Path, *, seed: int = 0, warmed_up: bool = True) -> Path:
    """Write a model to `folder`, and return the folder.

    Raises:
        RuntimeError: The warm-up misses its accuracies.
    """
    tokenizer = build_tokenizer(MAX_POSITIONS)
    with _reproducible(seed):
        model = _qwen35(recipe, tokenizer) if recipe.qwen35 else _qwen3(recipe, tokenizer)
        if warmed_up:
            _warm_up(model, tokenizer, recipe, seed)

    model.generation_config = transformers().GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if recipe.qwen35:  # SGLang reads the interval; transformers only writes the type of each layer
        file = folder / "config.json"
        config = {**json.loads(file.read_text()), "full_attention_interval": FULL_ATTENTION_INTERVAL}
        file.write_text(json.dumps(config, indent=2) + "\n")
    return folder


def _warm_up(model: Any, tokenizer: Any, recipe: Recipe, seed: int) -> None:
    from tests.tiny_models import sums, tool_calls

    if not recipe.tools:
        sums.warm_up(model, tokenizer, *generated("arithmetic", GeneratedConfig()), seed)
        return

    train, held_out = generated("products", GeneratedConfig())
    train_chains, held_out_chains = tool_calls.chains()
    tool_calls.warm_up(model, tokenizer, [*train, *train_chains], [*held_out, *held_out_chains], seed)


def _qwen3(recipe: Recipe, tokenizer: Any) -> Any:
    package = transformers()
    return package.Qwen3ForCausalLM(package.Qwen3Config(**_shapes(recipe, tokenizer)))


def _qwen35(recipe: Recipe, tokenizer: Any) -> Any:
    """Build the text model only. A quarter of each head is rotated, as in the family's real models."""
    package = transformers()
    size = recipe.hidden // recipe.heads
    # Pairs of rotated dimensions, split into time, height and width.
    half = max(1, size // 8)
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 2 * half / size}
    config = package.Qwen3_5TextConfig(
        **_shapes(recipe, tokenizer),
        full_attention_interval=FULL_ATTENTION_INTERVAL,
        linear_key_head_dim=size,
        linear_value_head_dim=size,
        linear_num_key_heads=recipe.heads // 2,
        linear_num_value_heads=recipe.heads,
        partial_rotary_factor=2 * half / size,
        rope_parameters={**rope, "mrope_section": [half - 2 * (half // 3), half // 3, half // 3]},
    )
    return package.Qwen3_5ForCausalLM(config)


def _shapes(recipe: Recipe, tokenizer: Any) -> dict[str, Any]:
    """Settings of both families. At this width an initialization wider than Qwen's 0.02 halves the warm-up steps."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": recipe.hidden,
        "intermediate_size": 2 * recipe.hidden,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.heads // 2,
        "head_dim": recipe.hidden // recipe.heads,
        "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": 0.1,
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }


@contextmanager
def _reproducible(seed: int) -> Iterator[None]:
    """Run on one thread with a seeded generator, then restore the caller's threads and generator state."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(RECIPES), help=f"some of {', '.join(RECIPES)}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=TINY_MODELS, help="a folder for the models' folders")
    given = parser.parse_args()
    for name in given.names:
        make(RECIPES[name], given.out / name, seed=given.seed)


if __name__ == "__main__":
    main()
