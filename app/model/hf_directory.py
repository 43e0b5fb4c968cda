"""Locate the files of a model: a local directory, or a hub model (downloaded once).

`locate` returns a complete Hugging Face directory: config.json, a tokenizer and safetensors. Nothing downstream depends
on its origin.
"""

import json
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from app.config.model import LoraConfig, ModelConfig
from app.config.peft_adapter import CONFIG as ADAPTER_CONFIG
from app.device.torchvision_shim import transformers
from app.environment.rendering.chat_template import template_of
from app.environment.rendering.tokenizer_file import TokenizerFile, read_json
from app.environment.rendering.tokenizer_file import stop_ids as stop_ids  # for those who load a model
from app.errors import ConfigError, expect, one_line
from app.model.lora.base_weights import fingerprint, weight_map
from app.utils.hub import cached_file, download_model

CONFIG = "config.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")  # at least one is required
# Spaces, line breaks, accents, digits and code: where tokenizers differ.
PROBE = "  It 's 12,345 .\n\n\tNée — 中文 🙂\ndef f(x):\n    return x[-1] != 'a'\n"
# Fields of config.json that identify a model.
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


def locate(config: ModelConfig) -> Path:
    """Return the directory of the initial model, downloading it if necessary.

    Raises:
        ConfigError: If there is no such model, or its directory is incomplete.
    """
    given = str(config.path)
    local = config.local
    folder = local.absolute() if local.exists() or is_path(given) else download_model(given, config.revision)
    require_complete(folder, given)
    return folder


def local_folder(config: ModelConfig) -> Path | None:
    """Return the directory of a model that need not be downloaded; else None."""
    if config.local.is_dir():
        return config.local.absolute()
    found = None if is_path(str(config.path)) else cached_file(str(config.path), TOKENIZERS[0], config.revision)
    return found and found.parent


def load_tokenizer(path: Path, *, trust_remote_code: bool = False, chat_template: str | None = None) -> Any:
    """Load the tokenizer of a model directory, with `chat_template` in place of the model's own.

    If there is a `tokenizer.json`, which environments read, it decides. Raises `ConfigError` if a file cannot be read.
    """
    own = {} if chat_template is None else {"chat_template": chat_template}
    try:
        file = TokenizerFile(path) if (path / TOKENIZERS[0]).is_file() else None
        ships_code = trust_remote_code and "auto_map" in read_json(path / "tokenizer_config.json")
        if file is None or ships_code:
            loaded = transformers().AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, **own)
        else:
            # Unlike `AutoTokenizer`, this class does not import torch: seconds at every start, and 200 MB in every
            # process that only needs a tokenizer.
            from transformers import PreTrainedTokenizerFast

            loaded = PreTrainedTokenizerFast.from_pretrained(path, **own)
        # transformers 5 adds tokens that tokenizer_config.json names, and a class that it names replaces the
        # pre-tokenizer (5.19: DeepSeek-R1-Distill-Llama, a LlamaTokenizerFast, loses all spaces).
        if file is not None and hasattr(loaded, "backend_tokenizer"):
            loaded._tokenizer = file.backend
        elif file is not None and loaded.encode(PROBE, add_special_tokens=False) != file.encode(PROBE):
            raise ValueError(f"its code encodes another way than {TOKENIZERS[0]}, which environments read")
        # Else decoding removes spaces before punctuation, and a decoded completion differs from the sampled one.
        loaded.clean_up_tokenization_spaces = False
        if loaded.eos_token is None and (stops := stop_ids(path)):  # as the declared class has it, of GPT-2
            loaded.eos_token = loaded.convert_ids_to_tokens(stops[0])
    # transformers and tokenizers pass on any error that a broken file causes.
    except Exception as error:
        why = f"{type(error).__name__}: {one_line(error).rstrip('.')}"
        raise ConfigError("model.path", path, "a directory whose tokenizer can be read", why) from error
    return loaded


def own_template(config: ModelConfig) -> str | None:
    """Return the text of `model.chat_template`, or None. Raises `ConfigError` if the file cannot be read."""
    if config.chat_template is None:
        return None
    try:
        return Path(config.chat_template).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        accepted = "a readable file with a Jinja template"
        raise ConfigError("model.chat_template", config.chat_template, accepted, type(error).__name__) from error


def identity(path: Path, lora: LoraConfig, chat_template: str | None = None) -> dict[str, Any]:
    """Return the fields that must match between a checkpoint and its model, and the directory as `source`.

    The directory may move, so its weights and its tokenizer are identified. Adapters are of `base`; of a full policy
    the `weights` are those of its beginning, from which the reference of a KL penalty is loaded. The text of a chat
    template that is not the model's own is `chat_template`, which an export of the checkpoint gets.
    """
    config = _text_config(path)
    shapes = {key: config[key] for key in SHAPES if key in config}
    weights = fingerprint(path)
    settings = {key: value for key, value in asdict(lora).items() if key != "path"}
    trained = {"base": weights, "lora": settings} if lora.enabled else {"weights": weights}
    template = {} if chat_template is None else {"chat_template": chat_template}
    files = [path / name for name in TOKENIZERS if (path / name).is_file()]
    texts = [file.read_bytes() for file in files[:1]] + [(chat_template or template_of(path) or "").encode()]
    tokenizer = {"tokenizer": sha256(b"\0".join(texts)).hexdigest()[:16]}
    return {**shapes, **trained, **tokenizer, **template, "source": str(path.absolute())}


def require_window(path: Path, *, tokens: int) -> None:
    """Raise `ConfigError` if the model has a sliding window below `tokens`, which packed attention does not support."""
    config = _text_config(path)
    window = config.get("sliding_window")
    layer_types = config.get("layer_types")
    slides = "sliding_attention" in layer_types if layer_types else config.get("use_sliding_window", True)

    if window is not None and slides and tokens > window:
        accepted = f"rollout.max_prompt_tokens and rollout.max_completion_tokens of at most {window} together"
        why = f"its sliding window of {window} tokens is not supported"
        raise ConfigError("model.path", path, accepted, why)


def _text_config(path: Path) -> dict[str, Any]:
    """Read `config.json`; the fields of a nested text model take precedence."""
    config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    return config | config.get("text_config", {})


def is_path(path: str) -> bool:
    """Whether this can only be a path: a hub id is `name` or `owner/name`."""
    return path.startswith(("/", "./", "../", "~")) or path.count("/") > 1


def require_complete(folder: Path, given: str) -> None:
    """Raise `ConfigError` if a model directory lacks one of its files. `given` is how the user wrote it."""
    key = "model.path"
    expect(folder.is_dir(), key, given, "a directory that exists")
    adapter = (folder / ADAPTER_CONFIG).is_file() and not (folder / CONFIG).is_file()
    accepted = "the adapter's base, and model.lora.path=<this directory>, a PEFT adapter, to continue it"
    expect(not adapter, key, given, f"{accepted}; or the merged model, beside it in an export of a run")
    expect((folder / CONFIG).is_file(), key, given, f"a Hugging Face model directory; this one has no {CONFIG}")
    has_class = _names_class(folder / CONFIG)
    expect(has_class, key, given, f"a directory whose {CONFIG} names a class in architectures; this one names none")
    has_tokenizer = any((folder / name).is_file() for name in TOKENIZERS)
    expect(has_tokenizer, key, given, f"a model directory with a tokenizer ({' or '.join(TOKENIZERS)})")
    expect(bool(weight_map(folder)), key, given, "a model directory with safetensors; this one has none")


def _names_class(file: Path) -> bool:
    """Whether a `config.json` names a model class, without which no engine starts; one that is not JSON fails later."""
    try:
        return bool(json.loads(file.read_text(encoding="utf-8")).get("architectures"))
    except (ValueError, AttributeError):
        return True
