"""Shapes and parameter counts of a model, for `mode=plan`.

They come from the `config.json` of a local directory or of the hub cache, or from a table of hub models. Counting needs
neither a model class nor torch. Qwen3.5 keeps a KV cache in one of four layers only; the other layers keep a state of
fixed size per request.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.config.engine_flags import CONTEXT_FLAG
from app.config.model import ALL_LINEAR, TINY_PRESETS, LoraConfig, ModelConfig
from app.config.rollout import NO_DRAFTS, OWN_HEAD, RolloutConfig
from app.errors import ConfigError, expect, one_line
from app.utils.hub import cached_file

DENSE = ("llama", "mistral", "qwen2", "qwen3", "qwen3_5", "qwen3_5_text")
QUERY_KEY_NORMS = ("qwen3", "qwen3_5_text")
LINEAR_KEYS = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
CHECKPOINT_CONFIG = "config.json"
RESERVED_TOKENS = 7  # SGLang's schedulers refuse an input of the context less 6 tokens
# Fields with the number of positions, in the order in which SGLang looks for them.
CONTEXT_KEYS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")

Shapes = Mapping[str, tuple[int, int]]  # linear layer → (features in, features out)


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """Shapes of a gated delta-net layer."""

    key_heads: int
    value_heads: int
    key_dim: int  # per head
    value_dim: int  # per head
    convolution: int  # kernel size

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def value_channels(self) -> int:
        return self.value_heads * self.value_dim

    def state_bytes(self, conv_bytes: int, item: int) -> int:
        """State of one layer and request: the recurrent state, `item` bytes each, and the convolution's last inputs."""
        recurrent = item * self.value_heads * self.key_dim * self.value_dim
        return recurrent + conv_bytes * self.channels * (self.convolution - 1)


@dataclass(frozen=True, slots=True)
class Architecture:
    """Shapes of a dense decoder."""

    layers: int
    full_layers: int  # layers with full attention, which keep a KV cache
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool  # LM head and embedding share one tensor
    head_norms: bool = True  # norms of queries and keys
    linear: LinearAttention | None = None  # of the other layers; with it, full attention has an output gate
    vision_parameters: int = 0  # of a vision tower, loaded by the engine only

    @property
    def full_attention(self) -> Shapes:
        """The projections of a layer with full attention."""
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        queries = width if self.linear is None else 2 * width  # with an output gate
        return {
            "q_proj": (self.hidden, queries),
            "k_proj": (self.hidden, kv_width),
            "v_proj": (self.hidden, kv_width),
            "o_proj": (width, self.hidden),
        }

    @property
    def linear_attention(self) -> Shapes:
        """The projections of a layer with linear attention, but for those of its decays."""
        if self.linear is None:
            return {}
        return {
            "in_proj_qkv": (self.hidden, self.linear.channels),
            "in_proj_z": (self.hidden, self.linear.value_channels),
            "out_proj": (self.linear.value_channels, self.hidden),
        }

    @property
    def mlp(self) -> Shapes:
        up = (self.hidden, self.ffn)
        return {"gate_proj": up, "up_proj": up, "down_proj": (self.ffn, self.hidden)}

    @property
    def full_layer_parameters(self) -> int:
        head_norms = 2 * self.head_dim if self.head_norms else 0
        return _elements(self.full_attention) + head_norms + self._mlp_and_norms

    @property
    def linear_layer_parameters(self) -> int:
        """Parameters of a layer with linear attention; 0 without such layers."""
        linear = self.linear
        if linear is None:
            return 0
        projections = _elements(self.linear_attention) + 2 * linear.value_heads * self.hidden  # those of the decays too
        others = linear.channels * linear.convolution + 2 * linear.value_heads + linear.value_dim  # decays and norm too
        return projections + others + self._mlp_and_norms

    @property
    def root_parameters(self) -> int:
        """Parameters outside the layers: embedding, head and final norm, which FSDP2 gathers together."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        """Parameters of the text model."""
        linear_layers = self.layers - self.full_layers
        layers = self.full_layers * self.full_layer_parameters + linear_layers * self.linear_layer_parameters
        return self.root_parameters + layers

    @property
    def largest_tensor(self) -> int:
        """In elements."""
        return max(self.vocabulary, self.ffn) * self.hidden

    def kv_bytes_per_token(self, item: int, tensor_parallel: int = 1) -> int:
        """KV cache of one token on one engine rank. Every rank holds at least one head."""
        return self.full_layers * 2 * max(1, self.kv_heads // tensor_parallel) * self.head_dim * item

    def state_bytes_per_request(self, conv_bytes: int, tensor_parallel: int = 1, *, item: int = 4) -> int:
        """Linear-attention state of one request on one engine rank; 0 without such layers."""
        if self.linear is None:
            return 0
        return (self.layers - self.full_layers) * self.linear.state_bytes(conv_bytes, item) // tensor_parallel

    @property
    def _mlp_and_norms(self) -> int:
        return _elements(self.mlp) + 2 * self.hidden


def _elements(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def adapter_parameters(model: Architecture, lora: LoraConfig) -> int:
    """Return the number of parameters of all adapters: rank · (in + out) of each adapted layer."""

    def features(shapes: Shapes) -> int:
        return sum(sum(shape) for name, shape in shapes.items() if lora.targets == [ALL_LINEAR] or name in lora.targets)

    attention = model.full_layers * features(model.full_attention)
    attention += (model.layers - model.full_layers) * features(model.linear_attention)
    return lora.rank * (attention + model.layers * features(model.mlp))


def trained_parameters(model: Architecture, lora: LoraConfig) -> int:
    """Return the number of parameters that a run trains: those of the adapters, or without them all."""
    return adapter_parameters(model, lora) if lora.enabled else model.parameters


@dataclass(frozen=True, slots=True)
class Draft:
    """Parameters of a draft of the next tokens, on an engine rank of `width`."""

    layers: int  # with a KV cache like that of a layer of the policy
    sharded: int  # parameters that tensor parallelism divides
    whole: int  # parameters that every rank has
    shared: int  # parameters of embedding and head that are the policy's once the engine has started

    def parameters(self, width: int) -> float:
        return self.sharded / width + self.whole


def eagle3(config: Mapping[str, Any]) -> Draft:
    """Return the shapes of an EAGLE3 draft from its `config.json`.

    Its first layer sees an embedding beside a mixture of three of the policy's hidden states.
    """
    hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
    width = heads * (config.get("head_dim") or hidden // heads)
    kv_width = width // heads * (config.get("num_key_value_heads") or heads)
    projections = (layers + 1) * hidden * (width + 2 * kv_width) + layers * hidden * width
    mlp = layers * 3 * hidden * config["intermediate_size"]
    head = hidden * (config.get("draft_vocab_size") or 0)
    mixed = 3 * (config.get("target_hidden_size") or hidden) * hidden
    return Draft(layers, projections + mlp + head, mixed + (3 * layers + 1) * hidden, config["vocab_size"] * hidden)


def draft_of(rollout: RolloutConfig, model: Architecture) -> Draft | None:
    """Return the shapes of what drafts for a policy; None without drafts.

    Raises:
        ConfigError: The policy has no head for drafts, or the directory has no EAGLE3 draft for it.
    """
    key, path = "rollout.speculative", rollout.speculative
    if path == NO_DRAFTS:
        return None
    if path == OWN_HEAD:
        accepted = "the directory of an EAGLE3 draft: of the supported models Qwen3.5 alone has a head of its own"
        expect(model.linear is not None, key, path, accepted)
        # Qwen3.5's head is a layer with full attention over hidden states and embeddings.
        mixed = 2 * model.hidden * model.hidden
        shared = model.root_parameters - model.hidden
        return Draft(1, model.full_layer_parameters, mixed + 3 * model.hidden, shared)

    config = checkpoint_config(ModelConfig(path=path)) or {}
    kinds = config.get("architectures") or []
    hidden = config.get("target_hidden_size") or config.get("hidden_size")
    fits = (hidden, config.get("vocab_size")) == (model.hidden, model.vocabulary)
    accepted = f"a directory whose {CHECKPOINT_CONFIG} is that of an EAGLE3 draft for {model.hidden} channels and "
    accepted += f"{model.vocabulary} tokens"
    expect(fits and any("eagle3" in str(kind).lower() for kind in kinds), key, path, accepted)
    return eagle3(config)


VISION_PARAMETERS = 456_010_480  # of the Qwen3.5 tower
QWEN35_LINEAR = LinearAttention(16, 32, 128, 128, 4)
QWEN35_9B = Architecture(
    32, 8, 4096, 12288, 16, 4, 256, 248_320, tied=False, linear=QWEN35_LINEAR, vision_parameters=VISION_PARAMETERS
)
QWEN3_4B = Architecture(36, 36, 2560, 9728, 32, 8, 128, 151_936, tied=True)
QWEN3_17B = Architecture(28, 28, 2048, 6144, 16, 8, 128, 151_936, tied=True)
QWEN3_06B = Architecture(28, 28, 1024, 3072, 16, 8, 128, 151_936, tied=True)
KNOWN = {
    "Qwen/Qwen3-0.6B": QWEN3_06B,
    "Qwen/Qwen3-1.7B": QWEN3_17B,
    "Qwen/Qwen3-4B": QWEN3_4B,
    "Qwen/Qwen3.5-9B": QWEN35_9B,
}


def architecture_of(model: ModelConfig) -> Architecture | None:
    """Return the shapes of a configured model, or None if they are unknown without downloading it."""
    config = checkpoint_config(model)
    return KNOWN.get(str(model.path)) if config is None else from_config(config)


def checkpoint_config(model: ModelConfig) -> dict[str, Any] | None:
    """Read `config.json` from the model's directory or the hub cache. None: neither has it.

    Raises:
        ConfigError: The file is not JSON, or the model is a mixture of experts.
    """
    local = model.local / CHECKPOINT_CONFIG
    file = local if local.is_file() else cached_file(str(model.path), CHECKPOINT_CONFIG, model.revision)
    if file is None:
        return None

    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        accepted = f"a model whose {CHECKPOINT_CONFIG} can be read"
        raise ConfigError("model.path", model.path, accepted, one_line(error)) from error

    experts = any(config.get("text_config", config).get(key) for key in EXPERT_KEYS)
    expect(not experts, "model.path", model.path, "a dense decoder: a mixture of experts is not supported")
    return config


def unknown_shapes(model: ModelConfig) -> str:
    """Return why a model has no memory estimate."""
    config = checkpoint_config(model)
    if config is not None:
        return f"no estimate, model.path={model.path} is not a dense decoder of a known kind ({', '.join(DENSE)})"
    return (
        f"no estimate, the shapes of model.path={model.path} are not on this machine; fetch them with: "
        f"hf download {model.path} {CHECKPOINT_CONFIG}"
    )


def require_own_preset(model: ModelConfig) -> None:
    """Raise `ConfigError` if a tiny preset, whose sizes are a toy's, is given a model of another architecture."""
    own = TINY_PRESETS.get(model.name)
    if own is None:
        return

    accepted = f"an export of a run with model={model.name}, whose sizes are a toy's; for any other model write "
    accepted += f"model=hf model.path={model.path}"
    expect(architecture_of(model) == architecture_of(ModelConfig(path=own)), "model.path", model.path, accepted)


def require_context(
    rollout: RolloutConfig, config: dict[str, Any] | None, model: str, *, key: str = "model.path"
) -> None:
    """Raise `ConfigError` if a prompt and its completion may be longer than the model's context.

    `config` is the content of its `config.json`, None if unknown, and `key` the setting that names `model`.
    """
    flag = next((value for name, value in rollout.engine_args.items() if CONTEXT_FLAG.startswith(name)), None)
    context = context_tokens(config or {}) if flag is None else int(flag)
    if context is None:
        return

    limit, prompt = context - RESERVED_TOKENS, rollout.max_prompt_tokens
    has = f"{key}={model} has a context of {context} tokens, of which SGLang reserves {RESERVED_TOKENS}"
    expect(prompt < limit, "rollout.max_prompt_tokens", prompt, f"less than {limit}: {has}")
    accepted = f"at most {limit - prompt}: {has}, and prompts may take {prompt} (rollout.max_prompt_tokens)"
    completion = rollout.max_completion_tokens
    expect(prompt + completion <= limit, "rollout.max_completion_tokens", completion, accepted)


def context_tokens(config: dict[str, Any]) -> int | None:
    """Return the context of a model as SGLang derives it from `config.json`; None if the file has no such field."""
    text = config.get("text_config", config)
    positions = next((text[key] for key in CONTEXT_KEYS if text.get(key) is not None), None)
    if positions is None:
        return None

    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    scaled = "original_max_position_embeddings" in scaling or scaling.get("rope_type") == "llama3"
    return int(positions * (1 if scaled else scaling.get("factor", 1)))


def from_config(config: dict[str, Any]) -> Architecture | None:
    """Read the shapes from a checkpoint's `config.json`. Returns None for unsupported kinds (such as experts)."""
    text = config.get("text_config", config)
    kind = text.get("model_type")
    if kind not in DENSE:
        return None

    layers = full_layers = text["num_hidden_layers"]
    heads = text["num_attention_heads"]
    linear = None
    if "linear_num_value_heads" in text:
        linear = LinearAttention(*(text[f"linear_{key}"] for key in LINEAR_KEYS))
        full_layers = layers // text.get("full_attention_interval", 4)
        if kinds := text.get("layer_types"):
            full_layers = kinds.count("full_attention")

    return Architecture(
        layers=layers,
        full_layers=full_layers,
        hidden=text["hidden_size"],
        ffn=text["intermediate_size"],
        heads=heads,
        kv_heads=text.get("num_key_value_heads", heads),
        head_dim=text.get("head_dim") or text["hidden_size"] // heads,
        vocabulary=text["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        head_norms=kind in QUERY_KEY_NORMS,
        linear=linear,
        vision_parameters=VISION_PARAMETERS if "vision_config" in config else 0,
    )
