"""Recomputation, replicas and FSDP2 of a policy: one FSDP group for each layer, each end of the model, and the root.

    embedding     gathered for its forward pass only: its backward pass reads no weight
    layer group   all parameters of a layer, gathered for its forward and backward pass
    LM head       gathered from its forward to the end of its backward pass, which follows at once
    root group    the final norm; with it embedding and head if they are one tensor, gathered for the whole pass

One rank that computes in the dtype of its parameters keeps them as plain tensors: FSDP2 would copy each before use.

A layer with linear attention has two FSDP groups under mixed precision, because its decays compute in float32.

Adapters are in the group of the layer that they adapt. A group may hold a frozen base of another dtype beside them:
FSDP2 asks for one dtype of the trained parameters alone (at the first forward), and casts each when it gathers it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy

from app.config.trainer import Checkpointing
from app.errors import TrainerError
from app.model.attention import kept_operators, recomputing
from app.model.policy import FLOAT32_PARAMETERS, PolicyModel

# Parts of the names of operators whose results a recomputed layer keeps: attention's by SDPA, by torch's varlen
# kernels (also under FlashAttention 3 and 4), and on NPUs. Kernels of Triton are no operators.
ATTENTION = ("scaled_dot_product", "varlen_attn", "fusion_attention")
KEPT: dict[Checkpointing, tuple[str, ...]] = {
    Checkpointing.matmuls: (*ATTENTION, "aten.mm.", "aten.addmm.", "aten.linear."),
    Checkpointing.attention: ATTENTION,
    Checkpointing.all: (),
    Checkpointing.auto: (),
}


def recompute(causal_lm: Any, what: Checkpointing, *, preserve_rng_state: bool) -> None:
    """Let the backward pass recompute this much of each layer; `auto`, which the plan decides for a run, is `all`."""
    if what is Checkpointing.none:
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": preserve_rng_state}
    if kept := KEPT[what]:
        options["context_fn"] = partial(recomputing, partial(_keep, kept))
    if what is Checkpointing.matmuls:
        _keep_products(causal_lm.get_decoder().layers)
    causal_lm.gradient_checkpointing_enable(options)


def _keep(kept: Sequence[str], _context: object, operator: object, *_: object, **__: object) -> CheckpointPolicy:
    saves = any(name in str(operator) for name in kept)
    return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE


def _keep_products(layers: nn.Module) -> None:
    """Let the linear modules of layers compute where results are kept."""

    def keeping(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def kept(hidden: Tensor) -> Tensor:
            if torch.compiler.is_compiling():  # as part of an MLP
                return forward(hidden)
            with kept_operators():
                return forward(hidden)

        return kept

    linears: list[Any] = [module for module in layers.modules() if isinstance(module, nn.Linear)]
    for linear in linears:
        linear.forward = keeping(linear.forward)


def replica_mesh(device_type: str, ranks: int, replicas: int) -> tuple[DeviceMesh, dist.ProcessGroup | None]:
    """Return the mesh of the consecutive ranks of this rank's replica, and the group of those that hold its rows.

    The group is None if there is one replica, whose mesh is that of all ranks. A collective.
    """
    if replicas == 1:
        return init_device_mesh(device_type, (ranks,)), None
    shape = (replicas, ranks // replicas)
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=("replicas", "shards"))
    return mesh["shards"], mesh["replicas"].get_group()


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


def reshard(model: nn.Module) -> None:
    """Free gathered parameters, so that only shards remain.

    A forward without a backward leaves those of the head and the root gathered: an update would not reach the next
    forward, nor would what is read into the shards.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
