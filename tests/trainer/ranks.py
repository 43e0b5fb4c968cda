"""Runs functions on several gloo ranks, one process each, and returns rank 0's result."""

import faulthandler
import os
import sys
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

    The processes are forked from a server with all imports done. What a rank printed is in the error if it dies.
    """
    set_forkserver_preload(["tests.trainer.imported"])
    given = (ranks, out.with_suffix(".rendezvous"), work, arguments, out)
    try:
        mp.start_processes(_rank, given, nprocs=ranks, start_method="forkserver")
    except mp.ProcessExitedException as error:
        raise RuntimeError(_printed(out, error.error_index).read_text()) from error
    return torch.load(out, weights_only=False)


def _printed(out: Path, rank: int) -> Path:
    return out.with_suffix(f".rank_{rank}")


def _rank(
    rank: int, ranks: int, rendezvous: Path, work: Callable[..., Any], arguments: tuple[Any, ...], out: Path
) -> None:
    with _printed(out, rank).open("w") as printed:
        os.dup2(printed.fileno(), sys.stderr.fileno())
    faulthandler.enable()
    define_operators()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(str(rendezvous), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
    results = work(init_device_mesh("cpu", (ranks,)), *arguments)
    if rank == 0:
        torch.save(results, out)
    # A group that is destroyed while another rank still leaves the last collective aborts that one (gloo's issue 155).
    store.set(f"finished {rank}", "")
    store.wait([f"finished {each}" for each in range(ranks)], timedelta(seconds=120))
    os._exit(0)
