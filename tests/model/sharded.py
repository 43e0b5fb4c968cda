"""Ranks of the sharding tests. `run` starts them and returns the full tensors of rank 0."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from app.model.load import load
from app.model.policy import named_checkpoint_tensors
from tests.model.support import batch, weights
from tests.trainer.ranks import processes

Result = dict[str, Any]
Runs = list[list[Result]]  # by options, by model


def run(paths: list[Path], out: Path, options: list[dict[str, Any]]) -> dict[int, Runs]:
    """Load, forward and backward each model with each set of `load`'s options, on one gloo rank and on two."""
    processes(_rank, (out.with_suffix(".rendezvous"), paths, out, options), 2)
    return torch.load(out)


def _rank(rank: int, rendezvous: Path, paths: list[Path], out: Path, options: list[dict[str, Any]]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    try:
        one_rank = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "ranks"))["ranks"]
        two_ranks = init_device_mesh("cpu", (2,))
        runs = {
            mesh.size(): [[_run(path, mesh, kwargs) for path in paths] for kwargs in options]
            for mesh in (one_rank, two_ranks)
        }
        if rank == 0:
            torch.save(runs, out)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _run(path: Path, mesh: Any, options: dict[str, Any]) -> Result:
    """Each rank computes the whole batch: FSDP2 averages gradients over ranks, so they equal those of one rank."""
    policy = load(path, mesh=mesh, device="cpu", **options)
    compute: dict[str, str] = {}
    mlp: Any = policy.layers[0].mlp
    mlp.register_forward_pre_hook(lambda *_: compute.update(_dtypes(policy.layers[0])))
    packed = batch(101)
    logprobs, entropies = policy(**packed.inputs, temperature=0.7, chunk_tokens=7)
    (logprobs * weights(packed)).sum().backward()

    tensors: dict[str, Tensor] = {}
    gradients: dict[str, Tensor] = {}
    local_rows: dict[str, int] = {}
    for name, parameter in named_checkpoint_tensors(policy):
        # One rank has nothing to shard, unless it computes in another dtype.
        assert isinstance(parameter, DTensor) == (mesh.size() > 1 or "compute_dtype" in options)
        local_rows[name] = (parameter.to_local() if isinstance(parameter, DTensor) else parameter).shape[0]
        tensors[name] = _full(parameter)
        gradients[name] = _full(parameter.grad)

    return {
        "logprobs": logprobs.detach(),
        "entropies": entropies,
        "tensors": tensors,
        "gradients": gradients,
        "local_rows": local_rows,
        "compute": compute,
    }


def _dtypes(layer: torch.nn.Module) -> dict[str, str]:
    """Dtypes of a layer's parameters during its forward pass."""
    return {name: str(parameter.dtype) for name, parameter in layer.named_parameters()}


def _full(tensor: Any) -> Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()
