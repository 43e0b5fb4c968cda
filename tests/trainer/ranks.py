"""Runs functions on several gloo ranks, one process each, and returns rank 0's result."""

import os
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from app.device.torchvision_shim import define_operators
from tests.trainer.support import Result, Scenario, play


def play_on(ranks: int, path: Path, scenarios: dict[str, Scenario], out: Path) -> dict[str, Result]:
    """Play every scenario on `ranks` gloo ranks."""
    return run_on(ranks, _play_all, out, path, scenarios)


def _play_all(mesh: DeviceMesh, path: Path, scenarios: dict[str, Scenario]) -> dict[str, Result]:
    return {name: play(path, scenario, mesh) for name, scenario in scenarios.items()}


def run_on(ranks: int, work: Callable[..., Any], out: Path, *arguments: Any) -> Any:
    """Return the result of `work(mesh, *arguments)` on rank 0. `work` must be a module-level function.

    The processes are forked from a server with all imports done.
    """
    set_forkserver_preload(["tests.trainer.imported"])
    given = (ranks, out.with_suffix(".rendezvous"), work, arguments, out)
    mp.start_processes(_rank, given, nprocs=ranks, start_method="forkserver")
    return torch.load(out, weights_only=False)


def _rank(
    rank: int, ranks: int, rendezvous: Path, work: Callable[..., Any], arguments: tuple[Any, ...], out: Path
) -> None:
    define_operators()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks, timeout=timedelta(seconds=120)
    )
    try:
        results = work(init_device_mesh("cpu", (ranks,)), *arguments)
        if rank == 0:
            torch.save(results, out)
        dist.barrier()
    finally:
        dist.destroy_process_group()
