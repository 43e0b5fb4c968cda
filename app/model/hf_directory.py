"""Where a model's files are: a local directory, a hub model that is fetched once, or the tiny model.

What `locate` returns is a complete Hugging Face directory: config.json, a tokenizer and safetensors. Nothing
downstream asks where it came from.
"""

import json
from pathlib import Path
from typing import Any

from app.config.model import ModelConfig
from app.errors import ConfigError
from app.model.hf_import import general_tokenizer, transformers

CONFIG = "config.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")  # any one of them
GENERAL = "TokenizersBackend"  # what tokenizer_config.json calls the class of `general_tokenizer`
SHAPES = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
)
HUB_FILES = ["*.json", "*.jinja", "*.safetensors", "*.model", "*.txt", "*.py"]


def locate(config: ModelConfig, *, seed: int) -> Path:
    """The directory of the model to start from. Raises `ConfigError` naming `model.path` when there is none.

    `seed` decides the tiny model's weights; other models do not depend on it.
    """
    if config.path is None:
        from app.model.tiny.create import ensure

        return ensure(config, seed=seed)
    local = Path(config.path).expanduser()
    folder = local.absolute() if local.exists() or _names_a_file(config.path) else _fetch(config.path)
    _check(folder, config.path)
    return folder


def load_tokenizer(path: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model directory. Raises `ConfigError` when its files cannot be read."""
    try:
        if _declared_tokenizer(path) == GENERAL:
            return general_tokenizer().from_pretrained(path)
        return transformers().AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers and tokenizers let through whatever a broken file makes of them
        why = f"{type(error).__name__}: {_first_line(error)}"
        raise ConfigError(
            f"model.path={path} is not accepted: give a directory whose tokenizer can be read ({why})."
        ) from error


def identity(path: Path) -> dict[str, Any]:
    """What makes two model directories the same to a checkpoint, and as `source` where this one is."""
    config = json.loads((path / CONFIG).read_text())
    config |= config.get("text_config", {})
    return {**{key: config[key] for key in SHAPES if key in config}, "source": str(path.absolute())}


def require_window(path: Path, *, tokens: int, attention: str) -> None:
    """Raise `ConfigError` for a model whose sliding window is shorter than `tokens`, where attention has none."""
    config = json.loads((path / CONFIG).read_text())
    config |= config.get("text_config", {})
    window = config.get("sliding_window")
    kinds = config.get("layer_types") or [
        "sliding_attention" if config.get("use_sliding_window", True) else "full_attention"
    ]
    if attention == "packed" and window is not None and "sliding_attention" in kinds and tokens > window:
        raise ConfigError(
            f"model.path={path} is not accepted: its window of {window} tokens is not built for this device; "
            f"give rollout.max_prompt_tokens and rollout.max_completion_tokens of at most {window} together."
        )


def _declared_tokenizer(path: Path) -> str | None:
    """The class that the tokenizer was saved as; None where the directory does not say, or brings its own."""
    file = path / "tokenizer_config.json"
    said = json.loads(file.read_text()) if file.is_file() else {}
    return said.get("tokenizer_class") if "auto_map" not in said else None


def _names_a_file(path: str) -> bool:
    """Whether this can only be meant as a path: a hub id is `name` or `owner/name`."""
    return path.startswith(("/", "./", "../", "~")) or path.count("/") > 1


def _fetch(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"model.path={hub_id} is not accepted: give a directory that exists or the id of a hub model that can be "
            f"reached from here ({_first_line(error)})."
        ) from error


def _check(folder: Path, given: str) -> None:
    _expect(folder.is_dir(), given, "a directory; there is none of that name")
    _expect((folder / CONFIG).is_file(), given, f"a Hugging Face model directory; this one has no {CONFIG}")
    has_tokenizer = any((folder / name).is_file() for name in TOKENIZERS)
    _expect(has_tokenizer, given, f"a model directory with a tokenizer ({' or '.join(TOKENIZERS)})")
    _expect(any(folder.glob("*.safetensors")), given, "a model directory with safetensors; this one has none")


def _expect(condition: bool, given: str, accepted: str) -> None:
    if not condition:
        raise ConfigError(f"model.path={given} is not accepted: give {accepted}.")


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
