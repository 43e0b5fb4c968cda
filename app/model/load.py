"""From a model directory to a (sharded) policy, without ever holding the whole model in one place.

    meta device ─→ fully_shard per layer and root ─→ empty shards ─→ each rank copies its own rows from safetensors

Always holds: tied weights stay one parameter; buffers that no checkpoint has (rotary frequencies) are computed anew;
a tensor that is missing or left over is an error, never a silent initialisation. The order is TorchTitan's.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from app.errors import ConfigError
from app.model import attention as attentions
from app.model.hf_checkpoint import Checkpoint, match, open_checkpoint
from app.model.hf_import import transformers
from app.model.policy import PolicyModel

FLOAT32 = ("A_log", "dt_bias")  # decays of linear attention: their exponential amplifies what bf16 rounds away
Owners = list[tuple[nn.Module, str]]


def load(
    path: Path,
    *,
    mesh: DeviceMesh | None,
    device: torch.device | str,
    param_dtype: torch.dtype = torch.float32,
    compute_dtype: torch.dtype = torch.float32,
    attention: str = attentions.PACKED,
    activation_checkpointing: bool = False,
    trust_remote_code: bool = False,
) -> PolicyModel:
    """The policy of a model directory, in training mode, on `device`.

    With a `mesh` (its dimension of sharding last) parameters are FSDP2 shards of `param_dtype` that compute in
    `compute_dtype` and reduce gradients in float32; without one it is a plain module of `param_dtype`. Raises
    `ConfigError` when the directory holds no causal language model or not exactly its tensors.
    """
    if mesh is None and compute_dtype != param_dtype:
        raise ValueError("without a mesh a model computes in param_dtype: mixed precision is FSDP2's")
    causal_lm = _on_meta(path, param_dtype, attention, trust_remote_code)
    if activation_checkpointing:
        causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
    shared = _owners(causal_lm)
    with open_checkpoint(path) as checkpoint:
        names = _match(causal_lm, shared, checkpoint)
        policy = PolicyModel(causal_lm, names).train()
        if mesh is not None:
            _shard(policy, mesh, compute_dtype)
        policy.to_empty(device=device)
        _tie(shared)
        _fill(causal_lm, names, checkpoint)
    _compute_buffers(causal_lm)
    return policy


def _on_meta(path: Path, dtype: torch.dtype, attention: str, trust_remote_code: bool) -> Any:
    if attention == attentions.PACKED:
        attentions.register()
    auto = transformers()
    try:
        config = auto.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            return auto.AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attention, trust_remote_code=trust_remote_code
            )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(
            f"model.path={path} is not accepted: give a causal language model that transformers can build "
            f"({str(error).strip().splitlines()[0].rstrip('.')})."
        ) from error


def _owners(model: nn.Module) -> list[Owners]:
    """For each parameter the modules that hold it, in model order; more than one where weights are tied."""
    owners: dict[int, Owners] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((module, name))
    return list(owners.values())


def _tie(shared: list[Owners]) -> None:
    """`to_empty` gives each owner a parameter of its own; make them one again."""
    for (first, name), *others in shared:
        for module, other_name in others:
            setattr(module, other_name, getattr(first, name))


def _match(causal_lm: Any, shared: list[Owners], checkpoint: Checkpoint) -> dict[str, str]:
    wanted = {name: tuple(tensor.shape) for name, tensor in _stored(causal_lm)}
    everywhere = {name for name, _ in causal_lm.named_parameters(remove_duplicate=False)}
    ignored = [*(causal_lm._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq"]
    return match(wanted, checkpoint, ignored=ignored, tied=everywhere - set(wanted))


def _stored(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What a checkpoint holds of a model: its parameters and its persistent buffers."""
    yield from model.named_parameters()
    persistent = set(model.state_dict())
    for name, buffer in model.named_buffers():
        if name in persistent:
            yield name, buffer


def _shard(policy: PolicyModel, mesh: DeviceMesh, compute_dtype: torch.dtype) -> None:
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for layer in policy.layers:
        _shard_layer(layer, mesh, precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision)


def _shard_layer(layer: nn.Module, mesh: DeviceMesh, precision: MixedPrecisionPolicy) -> None:
    """One group per layer; a second one of its own precision for the parameters that stay in float32.

    A precision belongs to a group, and a group to modules, so the layer's other modules become a group of their own
    and the layer's group keeps what they leave: a few hundred numbers.
    """
    if precision.param_dtype == torch.float32 or not any(name in FLOAT32 for _, name in _own_parameters(layer)):
        fully_shard(layer, mesh=mesh, mp_policy=precision)
        return
    fully_shard(_beside_float32(layer), mesh=mesh, mp_policy=precision)
    exact = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(layer, mesh=mesh, mp_policy=exact)


def _beside_float32(module: nn.Module) -> list[nn.Module]:
    """The largest modules within this one without a float32 parameter, in the order of their registration.

    Not a convolution: mixers read its weight without calling it, and a group follows its modules' calls.
    """
    found: list[nn.Module] = []
    for child in module.children():
        if any(name in FLOAT32 for _, name in _own_parameters(child)):
            found += _beside_float32(child)
        elif not isinstance(child, nn.Conv1d):
            found.append(child)
    return found


def _own_parameters(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Every parameter as the module that holds it and its name there."""
    for holder in module.modules():
        for name in holder._parameters:
            yield holder, name


@torch.no_grad()
def _fill(model: nn.Module, names: dict[str, str], checkpoint: Checkpoint) -> None:
    for name, tensor in _stored(model):
        if isinstance(tensor, DTensor):
            rows = _own_rows(tensor)
            if rows.start < rows.stop:
                tensor.to_local().copy_(checkpoint.read(names[name], rows))
        else:
            tensor.copy_(checkpoint.read(names[name]))


def _own_rows(parameter: DTensor) -> slice:
    """The rows of this rank: FSDP2 cuts dimension 0 into pieces of equal size, the last ones shorter or empty."""
    rows = parameter.shape[0]
    for dimension, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard):
            piece = -(-rows // parameter.device_mesh.size(dimension))
            start = min(parameter.device_mesh.get_local_rank(dimension) * piece, rows)
            return slice(start, min(start + piece, rows))
    return slice(0, rows)


@torch.no_grad()
def _compute_buffers(causal_lm: Any) -> None:
    """Fill the buffers that checkpoints do not hold, by the model class's own initialisation of their modules."""
    persistent = set(causal_lm.state_dict())
    for prefix, module in causal_lm.named_modules():
        own = {name: buffer for name, buffer in module.named_buffers(prefix, recurse=False) if name not in persistent}
        floating = {name: buffer for name, buffer in own.items() if buffer.is_floating_point()}
        if own and next(module.parameters(recurse=False), None) is not None:
            raise ConfigError(f"model.path is not accepted: {prefix} mixes parameters with buffers ({', '.join(own)}).")
        for buffer in floating.values():
            buffer.fill_(torch.nan)
        if own:
            causal_lm._init_weights(module)
        if unfilled := [name for name, buffer in floating.items() if buffer.isnan().any()]:
            raise ConfigError(
                f"model.path is not accepted: give a model class that can compute its buffers; "
                f"{type(causal_lm).__name__} leaves {', '.join(unfilled)} empty."
            )
