"""`model=tiny`: a tiny Qwen3 with a character tokenizer, made on first use, that RL can visibly improve in a minute.

`model=tiny_qwen35` is its sister of the second model family, whose warm-up takes a minute instead of ten seconds. Each
is a normal Hugging Face directory, so that nothing downstream knows that it is special. Always holds: the folder's name
is a hash of everything that decides its content; the same name means the same bytes on the same machine; a folder under
its final name is complete (it is written elsewhere and renamed).
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

from app.config.data import ArithmeticConfig
from app.config.model import Family, ModelConfig, TinyConfig
from app.data.arithmetic import problems
from app.model.hf_import import transformers
from app.model.tiny import tokenizer as characters

RECIPE = 4  # raise it when the recipe below or in warmup.py changes
MAX_POSITIONS = 4096  # tokens
FULL_ATTENTION_INTERVAL = 2  # of the Qwen3.5 kind: layers 1, 3, … have full attention
DEFAULT_CACHE = Path("~/.cache/hydra-posttrain")


def ensure(config: ModelConfig, *, seed: int) -> Path:
    """The tiny model's directory, made now if it is not there yet (about ten seconds on one core).

    Two processes may make it at once: both get the same, complete directory. Raises `ConfigError` when the warm-up
    cannot meet the accuracies asked for.
    """
    tiny = config.tiny
    cache = Path(tiny.cache) if tiny.cache else DEFAULT_CACHE
    cache = cache.expanduser().absolute()
    folder = cache / f"tiny-{_content_hash(tiny, seed)}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=".making-", dir=cache))
    try:
        _make(tiny, seed, making)
        making.chmod(0o755)  # mkdtemp's folder is the maker's alone
        try:
            making.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return folder


def _content_hash(tiny: TinyConfig, seed: int) -> str:
    decides = {key: value for key, value in asdict(tiny).items() if key not in ("cache", "family")}
    decides |= {"family": tiny.family.name, "seed": seed, "recipe": RECIPE, "arithmetic": asdict(ArithmeticConfig())}
    decides |= {package: version(package) for package in ("torch", "transformers", "tokenizers")}
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]


def _make(tiny: TinyConfig, seed: int, folder: Path) -> None:
    from app.model.tiny.warmup import warm_up

    train, held_out = problems(ArithmeticConfig(), seed)
    tokenizer = characters.tokenizer(MAX_POSITIONS)
    with _reproducible(seed):
        model = _qwen3(tiny, tokenizer) if tiny.family is Family.qwen3 else _qwen35(tiny, tokenizer)
        warm_up(model, tokenizer, train, held_out, tiny, seed)
    model.generation_config = transformers().GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if tiny.family is Family.qwen35:
        _name_interval(folder / "config.json")


def _qwen3(tiny: TinyConfig, tokenizer: Any) -> Any:
    package = transformers()
    return package.Qwen3ForCausalLM(package.Qwen3Config(**_shapes(tiny, tokenizer)))


def _qwen35(tiny: TinyConfig, tokenizer: Any) -> Any:
    """The text model alone. A quarter of each head is rotated, as in the family's real models."""
    package, size = transformers(), tiny.hidden // tiny.heads
    half = max(1, size // 8)  # pairs of rotated dimensions, shared out to time, height and width
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
    """What both families share. A wider initialisation than Qwen's .02: at this width it halves the warm-up's steps."""
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


def _name_interval(file: Path) -> None:
    """transformers writes the kind of each layer only; SGLang asks for the interval."""
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "full_attention_interval": FULL_ATTENTION_INTERVAL}, indent=2) + "\n")


@contextmanager
def _reproducible(seed: int) -> Iterator[None]:
    """One thread and a seeded generator; both are put back, so that the caller's randomness does not notice."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)
