"""What each rank of the sharding tests runs; started by `run`, which returns rank 0's full tensors."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from app.model.load import load
from app.model.policy import named_checkpoint_tensors
from tests.model.support import batch, weights

Result = dict[str, Any]


def run(paths: list[Path], ranks: int, out: Path, **options: Any) -> list[Result]:
    """Load, forward and backward each model on `ranks` gloo ranks."""
    rendezvous = out.with_suffix(".rendezvous")
    mp.spawn(_rank, (ranks, rendezvous, paths, out, options), nprocs=ranks, join=True)  # type: ignore[attr-defined]
    return torch.load(out)


def _rank(rank: int, ranks: int, rendezvous: Path, paths: list[Path], out: Path, options: dict[str, Any]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    try:
        mesh = init_device_mesh("cpu", (ranks,))
        results = [_one(path, mesh, options) for path in paths]
        if rank == 0:
            torch.save(results, out)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _one(path: Path, mesh: Any, options: dict[str, Any]) -> Result:
    """Each rank computes the whole batch: FSDP2 averages gradients over ranks, so they stay those of one rank."""
    policy = load(path, mesh=mesh, device="cpu", **options)
    given = batch(101)
    logprobs, entropies = policy(**given.inputs, temperature=0.7, chunk_tokens=7)
    compute = {name: str(p.dtype) for name, p in policy.causal_lm.named_parameters(remove_duplicate=False)}
    (logprobs * weights(given)).sum().backward()
    tensors, gradients, local_rows = {}, {}, {}
    for name, parameter in named_checkpoint_tensors(policy):
        assert isinstance(parameter, DTensor)
        local_rows[name] = parameter.to_local().shape[0]
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


def _full(tensor: Any) -> Tensor:
    return tensor.detach().full_tensor().clone()
