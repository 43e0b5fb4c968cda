"""Create the tiny models: small enough that RL improves them visibly within a minute, even on a CPU.

`model=tiny` is a tiny Qwen3 with a character tokenizer, created on first use in about ten seconds. `model=tiny_qwen35`
is a tiny Qwen3.5, whose warm-up takes a minute. `model=tiny_tools` is a tiny Qwen3 that can ask a calculator. All are
ordinary Hugging Face directories.

Invariants:
- The name of the folder is a hash of everything that determines its content: the same name means the same bytes on the
  same machine.
- A folder under its final name is complete: it is written under a temporary name and renamed.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from app.config.data import ArithmeticConfig, ChainConfig, ProductsConfig
from app.config.model import Family, ModelConfig, Skill, TinyConfig
from app.data import arithmetic, chain, products
from app.model.hf_import import transformers
from app.model.tiny.tokenizer import build_tokenizer

RECIPE = 4  # increment when the recipe below, in supervised.py or in warmup.py changes
TOOLS_RECIPE = 1  # increment when the recipe in asking.py or the answers of the calculator change
MAX_POSITIONS = 4096  # tokens
FULL_ATTENTION_INTERVAL = 2  # Qwen3.5 only: layers 1, 3, … have full attention
DEFAULT_CACHE = Path("~/.cache/hydra-posttrain")


def ensure(config: ModelConfig, *, seed: int) -> Path:
    """Return the directory of the tiny model, creating it if necessary (about ten seconds on one core).

    Safe to call from several processes at once: all get the same, complete directory.

    Raises:
        ConfigError: If the warm-up misses the configured accuracies.
    """
    tiny = config.tiny
    folder = folder_of(config, seed=seed)
    cache = folder.parent
    if folder.is_dir():
        return folder

    cache.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".tmp-", dir=cache))
    try:
        _create(tiny, seed, temporary)
        # mkdtemp creates a folder for its owner only.
        temporary.chmod(0o755)
        try:
            temporary.rename(folder)
        except OSError:
            # Otherwise another process created it first.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def folder_of(config: ModelConfig, *, seed: int) -> Path:
    """Return the directory that the tiny model has, or will have once it was created."""
    cache = Path(config.tiny.cache) if config.tiny.cache else DEFAULT_CACHE
    return cache.expanduser().absolute() / f"tiny-{_content_hash(config.tiny, seed)}"


def _content_hash(tiny: TinyConfig, seed: int) -> str:
    inputs = {key: value for key, value in asdict(tiny).items() if key not in ("cache", "family", "skill")}
    inputs |= {"family": tiny.family.name, "seed": seed, "recipe": RECIPE, "arithmetic": asdict(ArithmeticConfig())}
    if tiny.skill is Skill.tools:
        inputs |= {"tools": TOOLS_RECIPE, "products": asdict(ProductsConfig()), "chain": asdict(ChainConfig())}
    inputs |= {package: version(package) for package in ("torch", "transformers", "tokenizers")}
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]


def _create(tiny: TinyConfig, seed: int, folder: Path) -> None:
    tokenizer = build_tokenizer(MAX_POSITIONS)
    with _reproducible(seed):
        model = _qwen3(tiny, tokenizer) if tiny.family is Family.qwen3 else _qwen35(tiny, tokenizer)
        _warm_up(model, tokenizer, tiny, seed)

    model.generation_config = transformers().GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if tiny.family is Family.qwen35:
        _add_interval(folder / "config.json")


def _warm_up(model: Any, tokenizer: Any, tiny: TinyConfig, seed: int) -> None:
    from app.model.tiny import asking, warmup

    if tiny.skill is Skill.sums:
        train, held_out = arithmetic.problems(ArithmeticConfig(), seed)
        warmup.warm_up(model, tokenizer, train, held_out, tiny, seed)
        return

    train, held_out = products.problems(ProductsConfig(), seed)
    train_chains, held_out_chains = chain.problems(ChainConfig(), seed)
    asking.warm_up(model, tokenizer, [*train, *train_chains], [*held_out, *held_out_chains], tiny, seed)


def _qwen3(tiny: TinyConfig, tokenizer: Any) -> Any:
    package = transformers()
    return package.Qwen3ForCausalLM(package.Qwen3Config(**_shapes(tiny, tokenizer)))


def _qwen35(tiny: TinyConfig, tokenizer: Any) -> Any:
    """Build the text model only. A quarter of each head is rotated, as in the family's real models."""
    package = transformers()
    size = tiny.hidden // tiny.heads
    # Pairs of rotated dimensions, split into time, height and width.
    half = max(1, size // 8)
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 2 * half / size}
    config = package.Qwen3_5TextConfig(
        **_shapes(tiny, tokenizer),
        full_attention_interval=FULL_ATTENTION_INTERVAL,
        linear_key_head_dim=size,
        linear_value_head_dim=size,
        linear_num_key_heads=tiny.heads // 2,
        linear_num_value_heads=tiny.heads,
        partial_rotary_factor=2 * half / size,
        rope_parameters={**rope, "mrope_section": [half - 2 * (half // 3), half // 3, half // 3]},
    )
    return package.Qwen3_5ForCausalLM(config)


def _shapes(tiny: TinyConfig, tokenizer: Any) -> dict[str, Any]:
    """Settings of both families. At this width an initialization wider than Qwen's 0.02 halves the warm-up steps."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": tiny.hidden,
        "intermediate_size": 2 * tiny.hidden,
        "num_hidden_layers": tiny.layers,
        "num_attention_heads": tiny.heads,
        "num_key_value_heads": tiny.heads // 2,
        "head_dim": tiny.hidden // tiny.heads,
        "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": 0.1,
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }


def _add_interval(file: Path) -> None:
    """Add the interval that SGLang reads: transformers only writes the type of each layer."""
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "full_attention_interval": FULL_ATTENTION_INTERVAL}, indent=2) + "\n")


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
