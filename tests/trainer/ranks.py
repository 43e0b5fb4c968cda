"""What each rank of the two-rank tests runs; started by `play_on`, which returns rank 0's results."""

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

from app.device.torchvision import define_operators
from tests.trainer.support import Result, Scenario, play


def play_on(ranks: int, path: Path, scenarios: dict[str, Scenario], out: Path) -> dict[str, Result]:
    """Every scenario, one after the other, on `ranks` gloo ranks."""
    rendezvous = out.with_suffix(".rendezvous")
    mp.spawn(_rank, (ranks, rendezvous, path, scenarios, out), nprocs=ranks, join=True)  # type: ignore[attr-defined]
    return torch.load(out, weights_only=False)


def _rank(rank: int, ranks: int, rendezvous: Path, path: Path, scenarios: dict[str, Scenario], out: Path) -> None:
    define_operators()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks, timeout=timedelta(seconds=120)
    )
    try:
        mesh = init_device_mesh("cpu", (ranks,))
        results = {name: play(path, scenario, mesh) for name, scenario in scenarios.items()}
        if rank == 0:
            torch.save(results, out)
        dist.barrier()
    finally:
        dist.destroy_process_group()
