"""Load a model directory into a (sharded) policy, without ever holding the whole model in one process.

    meta device ─→ parallelize: FSDP2 shards ─→ empty shards ─→ each rank copies its own rows from safetensors

Invariants:
- Tied weights stay one parameter.
- Buffers that no checkpoint has (rotary frequencies) are recomputed.
- A missing or unexpected tensor is an error; nothing is initialized silently.
- There is no dropout: two forwards of the same tokens give the same log-probabilities, and those of the engine.
- The logits are exactly what the LM head returns: `PolicyModel` multiplies hidden states with its weight, nothing more.
- A base model under adapters, and a reference, has no float32 master: its parameters have the compute dtype, except
  for the decays of linear attention. Adapters are float32, and no checkpoint of a base model has them.

The order of the steps is TorchTitan's.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from app.config.model import LoraConfig
from app.config.trainer import Checkpointing
from app.device.torchvision_shim import transformers
from app.errors import ConfigError, expect, one_line
from app.model.attention import PACKED, register_packed, working_kernels
from app.model.hf_checkpoint import Checkpoint, match, open_checkpoint
from app.model.kernels import CPU_KERNELS, Kernels
from app.model.lora.layer import add_adapters, initialize, is_adapter, start_from
from app.model.lora.names import adapter_tensors
from app.model.parallelize import parallelize, recompute
from app.model.policy import FLOAT32_PARAMETERS, PolicyModel
from app.model.sharding import own_rows

DROPOUT_FIELD = re.compile(r"dropout|pdrop|layerdrop|drop_rate")
DROPOUT_MODULES = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
Owners = list[tuple[nn.Module, str]]  # (module, name of the parameter in it)


def load(
    path: Path,
    *,
    mesh: DeviceMesh | None,
    device: torch.device | str,
    param_dtype: torch.dtype = torch.float32,
    compute_dtype: torch.dtype = torch.float32,
    kernels: Kernels = CPU_KERNELS,
    activation_checkpointing: Checkpointing = Checkpointing.none,
    trust_remote_code: bool = False,
    lora: LoraConfig | None = None,
    seed: int = 0,
) -> PolicyModel:
    """Load the policy of a model directory in training mode.

    Args:
        mesh: Device mesh, sharding dimension last. Parameters become FSDP2 shards. None: a plain module.
        param_dtype: Dtype of the parameters. With adapters, those of the base have the compute dtype instead.
        compute_dtype: Dtype of the computation; gradients are reduced in float32. Requires a mesh.
        kernels: How the policy computes on its device.
        activation_checkpointing: What the backward pass recomputes; `auto`, which the plan decides for a run, is `all`.
        lora: Adapters to train in place of all weights, and those to start from; None, or a rank of 0: none.
        seed: Of the adapters' initial values.

    Raises:
        ConfigError: If the directory has no causal language model that `PolicyModel` supports, or not exactly its
            tensors, or `lora` has a target that the model does not have, or other adapters to start from.
    """
    if mesh is None and compute_dtype != param_dtype:
        raise ValueError("without a mesh a model computes in param_dtype: mixed precision requires FSDP2")

    adapted = lora is not None and lora.enabled
    causal_lm = _on_meta(path, compute_dtype if adapted else param_dtype, trust_remote_code)
    _check_head(causal_lm, path)
    _widen_decays(causal_lm)
    if lora is not None and adapted:
        add_adapters(causal_lm, lora)
    # Without dropout no layer of transformers draws random numbers; code from elsewhere may.
    recompute(causal_lm, activation_checkpointing, preserve_rng_state=trust_remote_code)
    owners = _owners(causal_lm)
    if kernels.linear is not None and torch.device(device).type != "cpu":
        tried = working_kernels(kernels.linear, causal_lm.get_decoder(), device, compute_dtype)
        kernels = replace(kernels, linear=tried)

    with open_checkpoint(path) as checkpoint:
        names = _match(causal_lm, checkpoint)
        policy = PolicyModel(causal_lm, names, kernels).train()
        if mesh is not None:
            parallelize(policy, mesh, compute_dtype)

        policy.to_empty(device=device)
        _tie(owners)
        _sparse_embedding_gradient(policy)
        _fill(causal_lm, names, checkpoint)

    initialize(causal_lm, seed)
    if lora is not None and lora.path is not None:
        start_from(dict(adapter_tensors(policy)), Path(lora.path).expanduser())
    _compute_buffers(causal_lm)
    return policy


def reload(policy: PolicyModel, path: Path) -> None:
    """Copy the tensors of the model directory to the policy again, each rank its own rows."""
    with open_checkpoint(path) as checkpoint:
        _fill(policy.causal_lm, policy.checkpoint_names, checkpoint)


def _on_meta(path: Path, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    register_packed()
    auto = transformers()
    try:
        config = auto.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        _disable_dropout(config)
        with torch.device("meta"):
            causal_lm = auto.AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=PACKED, trust_remote_code=trust_remote_code
            )
    except (OSError, ValueError, KeyError, ImportError) as error:
        accepted = "a causal language model that transformers can build"
        raise ConfigError("model.path", path, accepted, one_line(error)) from error

    # Some classes have rates of their own.
    for module in causal_lm.modules():
        if isinstance(module, DROPOUT_MODULES):
            module.p = 0.0
    return causal_lm


def _widen_decays(causal_lm: Any) -> None:
    """Make the decays of linear attention at least float32."""
    for module in causal_lm.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if name in FLOAT32_PARAMETERS:
                wide = torch.promote_types(parameter.dtype, torch.float32)
                setattr(module, name, nn.Parameter(parameter.detach().to(wide)))


def _disable_dropout(config: Any) -> None:
    """Set every dropout rate to 0 (`attention_dropout`, `resid_pdrop`, `layerdrop` and the like), nested ones too."""
    for name, value in vars(config).items():
        if isinstance(value, transformers().PretrainedConfig):
            _disable_dropout(value)
        elif DROPOUT_FIELD.search(name) and isinstance(value, float):
            setattr(config, name, 0.0)


def _check_head(causal_lm: Any, path: Path) -> None:
    """Raise `ConfigError` unless the logits of the model are `lm_head.weight` times the decoder's hidden states."""
    kind = type(causal_lm).__name__
    head = getattr(causal_lm, "lm_head", None)
    layers = getattr(causal_lm.get_decoder(), "layers", None)

    named = isinstance(head, nn.Linear) and isinstance(layers, nn.ModuleList)
    expect(named, "model.path", path, f"a model class with `lm_head` and a decoder with `layers`; {kind} has not both")
    expect(getattr(head, "bias", None) is None, "model.path", path, "a model whose LM head has no bias")
    accepted = f"a model whose logits are those of its LM head; {kind} scales or caps its logits (as Granite, Cohere "
    expect(_returns_head_output(causal_lm), "model.path", path, f"{accepted}and Gemma 2 do)")


@torch.no_grad()
def _returns_head_output(causal_lm: Any) -> bool:
    """Whether the hidden states reach the LM head, and its output the caller, unchanged. Computes no layer."""
    decoder, head = causal_lm.get_decoder(), causal_lm.lm_head

    # Whole numbers up to 256 are exact in bfloat16, to which a class may cast.
    hidden = (torch.arange(2 * head.in_features) % 256 - 128).float().view(1, 2, head.in_features)
    output = transformers().modeling_outputs.MoeModelOutputWithPast(last_hidden_state=hidden)

    def decode(*_: Any, **__: Any) -> Any:
        return output

    def identity(hidden_states: Tensor) -> Tensor:
        return hidden_states

    decoder.forward, head.forward = decode, identity
    try:
        logits = causal_lm(input_ids=torch.zeros(1, 2, dtype=torch.int64)).logits
    finally:
        del decoder.forward, head.forward
    return torch.equal(logits.float(), hidden)


def _owners(model: nn.Module) -> list[Owners]:
    """List the owning modules of each parameter, in model order; several if weights are tied."""
    owners: dict[int, Owners] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((module, name))
    return list(owners.values())


def _tie(owners: list[Owners]) -> None:
    """Tie weights again: `to_empty` gives each owner a separate parameter."""
    for (first, name), *others in owners:
        for module, other_name in others:
            setattr(module, other_name, getattr(first, name))


def _sparse_embedding_gradient(policy: PolicyModel) -> None:
    """Let a tied embedding on a CPU add the rows of its tokens to the head's gradient, not a tensor of its size."""
    embedding, head = policy.causal_lm.get_input_embeddings(), policy.causal_lm.lm_head
    tied = isinstance(embedding, nn.Embedding) and embedding.weight is head.weight
    exact = head.weight.dtype == torch.float32  # rows are summed in this dtype
    if tied and exact and head.weight.device.type == "cpu" and not isinstance(policy, FSDPModule):
        embedding.sparse = True


def _match(causal_lm: Any, checkpoint: Checkpoint) -> dict[str, str]:
    expected = {name: tuple(tensor.shape) for name, tensor in _stored(causal_lm)}
    named = causal_lm.named_parameters(remove_duplicate=False)
    all_names = {name for name, _ in named if not is_adapter(name)}
    ignored = [*(causal_lm._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq"]
    return match(expected, checkpoint, ignored=ignored, tied=all_names - set(expected))


def _stored(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a model that its checkpoint has: parameters of the base, and persistent buffers."""
    yield from ((name, parameter) for name, parameter in model.named_parameters() if not is_adapter(name))
    persistent = set(model.state_dict())
    for name, buffer in model.named_buffers():
        if name in persistent:
            yield name, buffer


@torch.no_grad()
def _fill(model: nn.Module, names: dict[str, str], checkpoint: Checkpoint) -> None:
    for name, tensor in _stored(model):
        if isinstance(tensor, DTensor):
            rows = own_rows(tensor)
            if rows.start < rows.stop:
                tensor.to_local().copy_(checkpoint.read(names[name], rows))
        else:
            tensor.copy_(checkpoint.read(names[name]))


@torch.no_grad()
def _compute_buffers(causal_lm: Any) -> None:
    """Fill the buffers that no checkpoint has, with the model class's own initialization of their modules."""
    persistent = set(causal_lm.state_dict())
    for prefix, module in causal_lm.named_modules():
        buffers = dict(module.named_buffers(prefix, recurse=False))
        computed = {name: buffer for name, buffer in buffers.items() if name not in persistent}
        if not computed:
            continue

        # Initializing the module would overwrite its loaded parameters.
        if next(module.parameters(recurse=False), None) is not None:
            accepted = "a model class whose modules do not mix parameters and computed buffers"
            raise ConfigError("model.path", "", accepted, f"{prefix} does ({', '.join(computed)})")

        floating = {name: buffer for name, buffer in computed.items() if buffer.is_floating_point()}
        for buffer in floating.values():
            buffer.fill_(torch.nan)
        causal_lm._init_weights(module)

        unfilled = [name for name, buffer in floating.items() if buffer.isnan().any()]
        if unfilled:
            why = f"{type(causal_lm).__name__} leaves {', '.join(unfilled)} empty"
            raise ConfigError("model.path", "", "a model class that can compute its buffers", why)
