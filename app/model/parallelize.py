"""Apply FSDP2 to a policy: one FSDP group per decoder layer, one for each end of the model, and one for the root.

    embedding     gathered for its forward pass only: its backward pass reads no weight
    layer group   all parameters of a layer, gathered for its forward and backward pass
    LM head       gathered from its forward to the end of its backward pass, which follows at once
    root group    the final norm; with it embedding and head if they are one tensor, gathered for the whole pass

One rank that computes in the dtype of its parameters keeps them as plain tensors: FSDP2 would copy each before use.

A layer with linear attention has two FSDP groups under mixed precision, because its decays compute in float32.

Adapters are in the group of the layer that they adapt. A group may hold a frozen base of another dtype beside them:
FSDP2 asks for one dtype of the trained parameters alone (at the first forward), and casts each when it gathers it.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from app.errors import TrainerError
from app.model.policy import FLOAT32_PARAMETERS, PolicyModel


def parallelize(policy: PolicyModel, mesh: DeviceMesh, compute_dtype: torch.dtype) -> None:
    """Shard the parameters of a policy in place. On one rank that computes in their dtype there is nothing to do.

    Args:
        policy: May be on the meta device.
        mesh: The ranks over which FSDP2 shards, in one dimension.
        compute_dtype: Dtype of the computation, except for the decays of linear attention. Gradients are reduced in
            float32, those of float64 in that.
    """
    if mesh.size() == 1 and all(parameter.dtype == compute_dtype for parameter in policy.parameters()):
        return

    reduced = torch.promote_types(compute_dtype, torch.float32)
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduced)
    for layer in policy.layers:
        _shard_layer(layer, mesh, precision)

    embedding, head = policy.causal_lm.get_input_embeddings(), policy.causal_lm.lm_head
    if head.weight is not embedding.weight:
        fully_shard(embedding, mesh=mesh, mp_policy=precision)
        embedding.set_unshard_in_backward(False)
        fully_shard(head, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
    fully_shard(policy, mesh=mesh, mp_policy=precision)


def _shard_layer(layer: nn.Module, mesh: DeviceMesh, precision: MixedPrecisionPolicy) -> None:
    """Shard a layer in one FSDP group, or in two if some parameters compute in float32.

    A group has one precision and consists of modules. The layer's other modules therefore form one group, and the
    layer's own group keeps the remaining parameters: a few hundred numbers.
    """
    if precision.param_dtype == torch.float32 or not _has_float32(layer):
        fully_shard(layer, mesh=mesh, mp_policy=precision)
        return

    fully_shard(_modules_without_float32(layer), mesh=mesh, mp_policy=precision)
    # Without `cast_forward_inputs=False` FSDP2 would cast the hidden states of the whole layer to float32.
    exact = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(layer, mesh=mesh, mp_policy=exact)


def _modules_without_float32(module: nn.Module) -> list[nn.Module]:
    """List the largest submodules without a float32 parameter, in the order of their registration.

    Convolutions are excluded: mixers read their weight without calling them, and a group is gathered by module calls.
    """
    modules: list[nn.Module] = []
    for child in module.children():
        if _has_float32(child):
            modules += _modules_without_float32(child)
        elif not isinstance(child, nn.Conv1d):
            modules.append(child)
    return modules


def _has_float32(module: nn.Module) -> bool:
    return any(name.rpartition(".")[2] in FLOAT32_PARAMETERS for name, _ in module.named_parameters())


def reset_fsdp_state(model: nn.Module) -> None:
    """Drop unreduced gradients and reshard, after a forward or backward pass that raised. No-op for a plain module.

    A failed pass leaves FSDP2 modules in the middle of it. The next forward would treat such a module as still in its
    backward, and gradients that were not reduced yet would add to those of the next step. Neither raises an error; both
    give wrong gradients. A collective, since it gathers parameters.

    Raises:
        TrainerError: torch is older than 2.13 and cannot reset FSDP2's state.
    """
    if not isinstance(model, FSDPModule):
        return
    if not hasattr(model, "reset_iter_state"):
        raise TrainerError(
            f"a forward or backward pass failed, and torch {torch.__version__} cannot reset a sharded model after "
            "that: all later gradients would be wrong"
        )

    model.reset_iter_state()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            for parameter in module.parameters():
                parameter.grad = None
            module.reshard()
